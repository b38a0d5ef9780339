"""Answers as they come: server-sent events, one per step and answer, and `[DONE]`."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fastapi.responses import StreamingResponse

from tightfit.serve.http.answers import Json, Usage, Writer, error_body
from tightfit.serve.http.protocol import NO_ECHO, CompletionBody, Echo, Generation
from tightfit.serve.http.text_offsets import TextOffsets
from tightfit.serve.http.tools import CallStream
from tightfit.serve.requests.request import Answer, Output, Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.service import EngineDiedError, Service

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class ClientRequest:
    """A client's request, with the prompts, settings and writer made from it."""

    body: Generation
    prompts: list[list[int]]
    sampling: Sampling
    writer: Writer
    adapter: str | None = None
    texts: Sequence[str] = ()
    """The prompts, where answers are to begin with them."""
    echoes: tuple[Echo, ...] = ()
    """`texts` as answers begin with them, once they are read."""

    def echo(self, choice: int) -> Echo:
        """What the text of a choice begins with."""
        return self.echoes[choice // self.body.n] if self.echoes else NO_ECHO

    @property
    def is_silent(self) -> bool:
        """Whether no token is to be generated."""
        return isinstance(self.body, CompletionBody) and self.body.is_silent

    @cached_property
    def requests(self) -> list[Request]:
        """One request to the engine per prompt."""
        return [
            Request(
                id=f"{self.writer.id}/{index}",
                prompt=prompt,
                sampling=self.sampling,
                count=self.body.n,
                priority=self.body.priority,
                adapter=self.adapter,
            )
            for index, prompt in enumerate(self.prompts)
        ]


class EventStream(StreamingResponse):
    """Server-sent events. However the response ends, also if the client hangs up, it closes `rest`, which cancels the
    request."""

    def __init__(self, first: str, rest: AsyncGenerator[str, None]) -> None:
        async def both() -> AsyncGenerator[str, None]:
            yield first
            async for each in rest:
                yield each

        super().__init__(both(), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._rest = rest

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._rest.aclose()


def event(value: Any) -> str:
    """One server-sent event; characters other than a line feed that some clients take for a line end are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    for end in ("\x85", "\u2028", "\u2029"):
        text = text.replace(end, f"\\u{ord(end):04x}")
    return f"data: {text}\n\n"


async def streamed(service: Service, asked: ClientRequest, seconds: float) -> AsyncGenerator[str, None]:
    """The events of all answers. A failure after the first token is an event too, as the HTTP status has been sent."""
    usage = Usage(sum(len(each.prompt) for each in asked.requests))
    begun = False
    try:
        async with contextlib.aclosing(_all_outputs(service, asked, seconds)) as outputs:
            async for text in _written(outputs, asked, usage):
                begun = True
                yield text
    except TimeoutError:
        if not begun:
            raise
        yield event(error_body(f"it took longer than {seconds:g} s", "timeout"))
    except EngineDiedError as error:
        if not begun:
            raise
        yield event(error_body(str(error), "server_error"))
    options = asked.body.stream_options
    if options is not None and options.include_usage:
        yield event(asked.writer.ending(usage))
    yield DONE


async def _written(
    outputs: AsyncIterator[tuple[int, Output]], asked: ClientRequest, usage: Usage
) -> AsyncIterator[str]:
    writer = asked.writer
    begun: dict[int, TextOffsets] = {}
    reading: dict[int, tuple[CallStream, Answer]] = {}
    async for index, output in outputs:
        usage.add(output)
        if index not in begun:
            begun[index], reading[index] = writer.offsets(asked.echo(index)), (CallStream(), Answer())
            if writer.chat or asked.echoes:
                yield event(writer.opening(index, asked.echo(index)))
        if writer.reads_calls:
            for piece in _without_calls(index, output, *reading[index], writer):
                yield event(piece)
        elif output.text or output.finish or output.logprobs:
            yield event(writer.piece(index, output, begun[index]))


def _without_calls(index: int, output: Output, calls: CallStream, answer: Answer, writer: Writer) -> Iterator[Json]:
    """The pieces of an answer that may have tool calls: its text as it comes, its calls at its end."""
    answer.add(output)
    if text := calls.push(output.text):
        yield writer.text(index, text)
    if output.finish is not None:
        rest, found = calls.finish()
        if rest:
            yield writer.text(index, rest)
        yield from writer.calls(index, answer, found)


async def _all_outputs(
    service: Service, asked: ClientRequest, seconds: float
) -> AsyncGenerator[tuple[int, Output], None]:
    """Outputs of all requests as they come, with the number of the choice each belongs to."""
    if len(asked.requests) == 1:
        async with contextlib.aclosing(service.outputs(asked.requests[0], seconds)) as outputs:
            async for output in outputs:
                yield output.index, output
        return
    queue: asyncio.Queue[tuple[int, Output] | Exception | None] = asyncio.Queue()

    async def pump(first: int, request: Request) -> None:
        try:
            async with contextlib.aclosing(service.outputs(request, seconds)) as outputs:
                async for output in outputs:
                    queue.put_nowait((first + output.index, output))
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    count = asked.body.n
    tasks = [asyncio.create_task(pump(place * count, each)) for place, each in enumerate(asked.requests)]
    try:
        left = len(tasks)
        while left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
