"""Embeddings: what they are, and how they share a server with answers."""

import asyncio
import base64
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from torch import Tensor

from tests.serve.running import CONFIG, Running, running
from tests.serve.test_server import post, wait_until
from tightfit.models.embedding import embed
from tightfit.models.loading import LoadedModel
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.serve.engine import Engine
from tightfit.serve.http.guards import ServerLimits
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.service import OverloadedError, Service


def test_embeddings_are_mean_pooled_and_normed(
    client: openai.OpenAI, loaded: LoadedModel, tokenizer: Tokenizer
) -> None:
    texts = ["every document", "ends"]
    made = client.embeddings.create(model="tiny", input=texts)
    floats = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    found: list[Tensor] = []
    handle = loaded.model.norm.register_forward_hook(lambda _, __, out: found.append(out[0].mean(0)))
    with torch.no_grad():
        loaded.model(torch.tensor([tokenizer.encode(texts[0])]))
    handle.remove()
    wanted = torch.nn.functional.normalize(found[0], dim=0)
    torch.testing.assert_close(torch.tensor(floats.data[0].embedding), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(made.data[0].embedding), wanted, rtol=1e-4, atol=1e-5)
    assert len(made.data) == 2


def test_who_waits_for_an_embedding_hears_of_a_dead_engine(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, goes_on = Engine(loaded.model, loaded.tokenizer, CONFIG), threading.Event()

    def broken() -> None:
        goes_on.wait(60)
        raise RuntimeError("out of luck")

    with running(loaded, engine) as server, ThreadPoolExecutor(3) as clients:
        monkeypatch.setattr(engine, "step", broken)
        asked = [clients.submit(post, server, "/v1/completions", b'{"prompt": "a"}')]
        wait_until(lambda: engine.counts.requests == 1)
        asked += [clients.submit(post, server, "/v1/embeddings", b'{"input": "a"}') for _ in range(2)]
        wait_until(lambda: server.service.open_requests == 3)
        goes_on.set()
        assert [each.result()[0] for each in asked] == [503] * 3


@pytest.mark.parametrize("seconds", [0.2, 600.0])
def test_embeddings_are_limited_in_number_and_time(
    seconds: float, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, goes_on = Engine(loaded.model, loaded.tokenizer, CONFIG), threading.Event()
    monkeypatch.setattr(engine, "step", lambda: goes_on.wait(60) and [])
    limits, one = ServerLimits(requests=1, request_seconds=seconds), b'{"input": "a"}'
    with running(loaded, engine, limits) as server, ThreadPoolExecutor(1) as client:
        first, _ = post(server, "/v1/embeddings", one)
        assert first == 200 or seconds < 1  # a call comes before the step
        if seconds < 1:
            assert post(server, "/v1/embeddings", one)[0] == 504
        else:
            other = client.submit(post, server, "/v1/embeddings", one)
            wait_until(lambda: server.service.open_requests == 1)
            assert post(server, "/v1/embeddings", one)[0] == 429
        goes_on.set()
        if seconds > 1:
            assert other.result()[0] == 200


def test_a_request_that_was_admitted_is_answered_whole(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many texts it has, and whatever is asked while they are read."""
    engine, reading, goes_on = Engine(loaded.model, loaded.tokenizer, CONFIG), threading.Event(), threading.Event()

    def slow(*args: Any) -> Tensor:
        reading.set()
        assert goes_on.wait(60)
        return embed(*args)

    monkeypatch.setattr("tightfit.serve.http.app.embed", slow)
    several, one = b'{"input": ["a", "b", "c", "d"]}', b'{"prompt": "a", "max_tokens": 2}'
    with running(loaded, engine, ServerLimits(requests=1)) as server, ThreadPoolExecutor(1) as client:
        first = client.submit(post, server, "/v1/embeddings", several)
        assert reading.wait(60)
        assert post(server, "/v1/completions", one)[0] == 429
        assert post(server, "/v1/embeddings", several)[0] == 429
        goes_on.set()
        status, made = first.result()
        assert (status, len(made.get("data", ()))) == (200, 4)
        assert post(server, "/v1/completions", one)[0] == 200
        server.wait_until_idle()


def test_between_two_texts_the_place_is_kept(loaded: LoadedModel) -> None:
    """A request that comes when one text is read and the next is not asked for yet finds no place."""
    service = Service(Engine(loaded.model, loaded.tokenizer, CONFIG), most_requests=1)

    async def run() -> None:
        service.start(asyncio.get_running_loop())
        with service.admitted():
            for _ in range(3):
                await service.call(lambda engine: None)
                with pytest.raises(OverloadedError, match="1 of 1 requests are open"), service.admitted():
                    pass
        with service.admitted():
            assert service.open_requests == 1
        assert service.open_requests == 0

    asyncio.run(run())
    service.stop()


@pytest.mark.parametrize("stream", [b"false", b"true"])
def test_several_prompts_are_admitted_together(stream: bytes, loaded: LoadedModel, monkeypatch: Any) -> None:
    engine, goes_on = Engine(loaded.model, loaded.tokenizer, CONFIG), threading.Event()
    monkeypatch.setattr(engine, "step", lambda: goes_on.wait(60) and Engine.step(engine))
    body = b'{"prompt": ["a", "b"], "max_tokens": 2, "echo": true, "logprobs": 1, "stream": ' + stream + b"}"
    with running(loaded, engine, ServerLimits(requests=2)) as server, ThreadPoolExecutor(1) as client:
        first = client.submit(post, server, "/v1/completions", b'{"prompt": "a", "max_tokens": 2}')
        wait_until(lambda: engine.counts.requests == 1)
        assert post(server, "/v1/completions", body)[0] == 429
        assert engine.counts.requests == 1  # nothing of it was begun
        goes_on.set()
        assert first.result()[0] == 200
        server.wait_until_idle()


def test_embeddings_take_turns_with_the_steps_of_answers(loaded: LoadedModel) -> None:
    """However many wait, an answer under way waits for one at a time."""
    service = Service(Engine(loaded.model, loaded.tokenizer, CONFIG))

    async def run() -> list[int]:
        service.start(asyncio.get_running_loop())
        stream = service.outputs(Request(id="a", prompt=[5], sampling=Sampling(max_tokens=100, temperature=0)))
        await anext(stream)
        steps = await asyncio.gather(*(service.call(lambda engine: engine.counts.steps) for _ in range(20)))
        await stream.aclose()
        return steps

    steps = asyncio.run(run())
    service.stop()
    assert len(set(steps)) == 20


def test_base64_is_what_the_client_asks_for_by_itself(server: Running) -> None:
    _, made = post(server, "/v1/embeddings", b'{"input": "a", "encoding_format": "base64"}')
    assert len(base64.b64decode(made["data"][0]["embedding"])) == 4 * 32
