"""The answers to one request as streams of text, for whoever has no event loop."""

from collections import deque
from collections.abc import Iterator

from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Request


def text_streams(engine: Engine, request: Request) -> list[Iterator[str]]:
    """One stream per answer. All advance together: while one is read, the others' pieces wait."""
    engine.submit(request)
    waiting: list[deque[str]] = [deque() for _ in range(request.count)]
    over = [False] * request.count

    def advance() -> None:
        for output in engine.step():
            waiting[output.index].append(output.text)
            over[output.index] = output.finish is not None

    def stream(index: int) -> Iterator[str]:
        while waiting[index] or not over[index]:
            if waiting[index]:
                yield waiting[index].popleft()
            else:
                advance()

    return [stream(index) for index in range(request.count)]
