"""Embeddings: what they are, and how they share a server with answers."""

import asyncio
import base64
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from torch import Tensor

from tests.serve.running import CONFIG, Running, running
from tests.serve.test_server import post, wait_until
from tightfit.models.loading import LoadedModel
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.serve.engine import Engine
from tightfit.serve.http.guards import ServerLimits
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.service import Service


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
