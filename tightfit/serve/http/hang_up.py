"""Cancels work whose client has hung up."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Result = TypeVar("Result")


async def until_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """What `work` returns, or None where the client hangs up before; `work` is then cancelled."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_hung_up(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    except BaseExceptionGroup as group:  # tasks may fail together: raise the first one's error
        raise group.exceptions[0] from None
    finally:
        for each in (task, gone):
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
