"""The engine in a thread of its own, for a server whose requests live in an event loop.

The loop puts requests and cancellations into an inbox, which the thread empties before every step; outputs go back in
one call per step. Each request has a queue of its own, so a client that reads slowly delays no other. When the engine
fails, every waiting request gets an `EngineDiedError`, and `on_failure` is called.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Answer, Output, Request

Work = Callable[[Engine], Any]
Future = asyncio.Future[Any]


class EngineDiedError(RuntimeError):
    """The engine has failed; nothing can be answered any more."""


class OverloadedError(RuntimeError):
    """The limit on open requests is reached."""


@dataclass
class TokenRate:
    """Tokens a second over the last `window_s`, for metrics; for one thread."""

    window_s: float = 5.0
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, tokens: int) -> None:
        """Count tokens that were generated just now."""
        self._seen.append((time.monotonic(), tokens))
        self._forget_old()

    def per_second(self) -> float:
        """Tokens a second, over the window."""
        self._forget_old()
        return sum(tokens for _, tokens in self._seen) / self.window_s

    def _forget_old(self) -> None:
        until = time.monotonic() - self.window_s
        while self._seen and self._seen[0][0] < until:
            self._seen.popleft()


class Service:
    """Runs an engine; all methods but `start` and `stop` are for the event loop."""

    def __init__(self, engine: Engine, *, most_requests: int = 512) -> None:
        self.engine, self.most_requests = engine, most_requests
        self.rates = TokenRate()
        self.failure: BaseException | None = None
        self.draining = False
        self._queues: dict[str, asyncio.Queue[Output | None]] = {}
        self._inbox: deque[Work] = deque()
        self._calls: deque[tuple[Work, Future]] = deque()
        self._open_calls: set[Future] = set()
        self._places = 0
        self._wake = threading.Condition()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._on_failure: Callable[[], None] = lambda: None

    def start(self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[], None] = lambda: None) -> None:
        """Start the thread; `on_failure` is called in the loop when the engine dies."""
        self._loop, self._on_failure = loop, on_failure
        self._thread.start()

    def stop(self) -> None:
        """End the thread once its step is over."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    @property
    def open_requests(self) -> int:
        """The number of requests whose answers are not complete yet."""
        return self._places

    @contextlib.contextmanager
    def admitted(self, count: int = 1) -> Iterator[None]:
        """Places for `count` requests until the block is left: all of them, or an OverloadedError before any work."""
        self._check_alive()
        if self._places + count > self.most_requests:
            raise OverloadedError(f"{self._places} of {self.most_requests} requests are open already; come back later")
        self._places += count
        try:
            yield
        finally:
            self._places -= count

    async def outputs(self, request: Request, seconds: float | None = None) -> AsyncGenerator[Output, None]:
        """The outputs of `request` until all its answers are over; closing the generator early cancels it.

        After `seconds` it is cancelled with a TimeoutError.
        """
        request = await self.check(request)
        self._check_alive()
        queue: asyncio.Queue[Output | None] = asyncio.Queue()
        self._queues[request.id] = queue
        self._put(lambda engine: engine.submit(request))
        left = request.count
        until = None if seconds is None else asyncio.get_running_loop().time() + seconds
        try:
            while left:
                async with asyncio.timeout_at(until):
                    output = await queue.get()
                if output is None:
                    raise self._died()
                left -= output.finish is not None
                yield output
        finally:
            self._queues.pop(request.id, None)
            if left:
                self._put(lambda engine: engine.cancel(request.id))

    async def check(self, request: Request) -> Request:
        """The request, checked by the engine: in a thread where compiling a grammar may take a second, so that the loop
        goes on."""
        if request.sampling.grammar is None:
            return self.engine.check(request)
        return await asyncio.to_thread(self.engine.check, request)

    async def answers(self, request: Request, seconds: float | None = None) -> list[Answer]:
        """The whole answers to `request`."""
        answers = [Answer() for _ in range(request.count)]
        async with contextlib.aclosing(self.outputs(request, seconds)) as outputs:
            async for output in outputs:
                answers[output.index].add(output)
        return answers

    async def call(self, work: Work) -> Any:
        """What `work` returns, run between two steps of the engine: one call at a time, so that answers go on."""
        self._check_alive()
        future: Future = asyncio.get_running_loop().create_future()
        self._open_calls.add(future)
        with self._wake:
            self._calls.append((work, future))
            self._wake.notify()
        try:
            return await future
        finally:
            self._open_calls.discard(future)

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise self._died()

    def _put(self, work: Work) -> None:
        with self._wake:
            self._inbox.append(work)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._take_work():
                outputs = self.engine.step()
                if outputs:
                    self._send(self._deliver, outputs)
        except BaseException as error:
            self.failure = error
            self._send(self._fail)

    def _take_work(self) -> bool:
        """Do the work in the inbox, waiting for some while the engine is idle; False once the service is stopping."""
        with self._wake:
            while not (self._inbox or self._calls or self._stopping or self.engine.has_work):
                self._wake.wait()
            if self._stopping:
                return False
            waiting, self._inbox = self._inbox, deque()
            call = self._calls.popleft() if self._calls else None
        for work in waiting:
            work(self.engine)
        if call is not None:
            self._answer_call(*call)
        return True

    def _answer_call(self, work: Work, future: Future) -> None:
        if future.done():
            return  # its client has gone
        try:
            result = work(self.engine)
        except Exception as error:
            self._send(_set, future, None, error)
        else:
            self._send(_set, future, result, None)

    def _send(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and with it all clients
            self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self, outputs: list[Output]) -> None:
        self.rates.add(sum(len(output.tokens) for output in outputs))
        for output in outputs:
            queue = self._queues.get(output.request)
            if queue is not None:
                queue.put_nowait(output)

    def _fail(self) -> None:
        for queue in self._queues.values():
            queue.put_nowait(None)
        for future in self._open_calls:
            _set(future, None, self._died())
        self._on_failure()

    def _died(self) -> EngineDiedError:
        return EngineDiedError(f"the engine has failed: {self.failure!r}")


def _set(future: Future, value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
