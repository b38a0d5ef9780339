"""Streams of one request, read one after the other, are its answers; a server's stream leaves nothing behind."""

import asyncio
import threading
from typing import Any

import pytest

from tightfit.models.loading import LoadedModel
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.http.answers import Writer
from tightfit.serve.http.protocol import CompletionBody
from tightfit.serve.http.streaming import ClientRequest, streamed
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.service import Service
from tightfit.serve.streams import text_streams

CONFIG = EngineConfig(max_sequences=4, step_tokens=32, block_size=4, cache_bytes=2**20)


def test_streams_are_the_answers(loaded: LoadedModel) -> None:
    request = Request(id="a", prompt=[5, 6, 7], sampling=Sampling(max_tokens=9, seed=2), count=3)
    wanted = Engine(loaded.model, loaded.tokenizer, CONFIG).generate([request])["a"]
    streams = text_streams(Engine(loaded.model, loaded.tokenizer, CONFIG), request)
    assert ["".join(stream) for stream in reversed(streams)] == [answer.text for answer in reversed(wanted)]


def test_a_stream_that_is_closed_leaves_no_task_behind(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several prompts, while it waits for a token; asyncio complained of every such stream."""
    engine, stepping, goes_on = Engine(loaded.model, loaded.tokenizer, CONFIG), threading.Event(), threading.Event()
    monkeypatch.setattr(engine, "step", lambda: stepping.set() or (goes_on.wait(60) and []))
    service, body = Service(engine), CompletionBody(prompt=["a", "b"], stream=True)
    assert loaded.tokenizer is not None
    writer = Writer("tiny", loaded.tokenizer, chat=False)
    asked = ClientRequest(body, [[5], [6]], body.sampling(loaded.tokenizer, 4, None), writer)

    async def run() -> set[Any]:
        service.start(asyncio.get_running_loop())
        events = streamed(service, asked, 60.0)
        waiting = asyncio.ensure_future(anext(events))
        assert await asyncio.to_thread(stepping.wait, 60)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await events.aclose()
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert not asyncio.run(run())
    goes_on.set()
    service.stop()
