"""Servers behind one address: who gets what, what passes through, and what happens when one is gone."""

import http.client
import json
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
import uvicorn

from tests.serve.running import Running, running
from tightfit.errors import UserError
from tightfit.models.loading import LoadedModel
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.http import replicas
from tightfit.serve.http.balancer import SLACK, Balancer
from tightfit.serve.http.guards import Guards, ServerLimits
from tightfit.serve.http.replicas import VISIBLE, without_own
from tightfit.serve.http.server import ServerOptions

CONFIG = EngineConfig(max_sequences=16, step_tokens=64, block_size=4, cache_bytes=2**20)


@contextmanager
def balanced(ports: list[int]) -> Iterator[tuple[int, Balancer]]:
    listening = socket.socket(proto=socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    balancer = Balancer(ports)
    server = uvicorn.Server(
        uvicorn.Config(Guards(balancer, ServerLimits()), log_level="critical", timeout_graceful_shutdown=5)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listening.getsockname()[1], balancer
    server.should_exit = True
    thread.join(timeout=30)
    listening.close()


@pytest.fixture(scope="module")
def two(loaded: LoadedModel) -> Iterator[tuple[list[Running], int, Balancer]]:
    engines = [Engine(loaded.model, loaded.tokenizer, CONFIG) for _ in range(2)]
    with (
        running(loaded, engines[0]) as one,
        running(loaded, engines[1]) as other,
        balanced([one.port, other.port]) as (port, balancer),
    ):
        yield [one, other], port, balancer


def client(port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)


def fetched(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_answers_are_those_of_one_server_and_both_are_used(two: Any) -> None:
    servers, port, _ = two
    settings: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    prompts = [f"{word} lazy dog" for word in ("the", "a", "every", "def", "numbers", "model", "fox", "quick")]
    direct = [client(servers[0].port).completions.create(prompt=p, **settings).choices[0].text for p in prompts]
    before = [each.service.engine.counts.requests for each in servers]
    through = [client(port).completions.create(prompt=p, **settings).choices[0].text for p in prompts]
    assert through == direct
    taken = [each.service.engine.counts.requests - was for each, was in zip(servers, before, strict=True)]
    assert sum(taken) == len(prompts)
    assert all(taken)


def test_streams_errors_and_numbers_pass_through(two: Any) -> None:
    servers, port, _ = two
    settings: dict[str, Any] = {"model": "tiny", "prompt": "the quick", "max_tokens": 12, "temperature": 0}
    pieces = [piece.choices[0].text for piece in client(port).completions.create(stream=True, **settings)]
    assert len(pieces) > 2
    assert "".join(pieces) == client(servers[0].port).completions.create(**settings).choices[0].text
    with pytest.raises(openai.NotFoundError, match="no model 'x'"):
        client(port).completions.create(model="x", prompt="y")
    assert fetched(port, "/health") == (200, '{"status":"ok"}')
    assert fetched(port, "/")[1].startswith("<!")
    stats, metrics = json.loads(fetched(port, "/stats")[1]), fetched(port, "/metrics")[1]
    requests = sum(each.service.engine.counts.requests for each in servers)
    assert stats["requests"] == requests
    assert f"tightfit_requests_total {requests}" in metrics


@pytest.mark.parametrize("path", ["/", "/health", "/stats", "/metrics", "/v1/models"])
def test_heads_and_other_methods_pass_through(two: Any, path: str) -> None:
    """Numbers are added up of bodies, which a head has none of."""
    _, port, _ = two
    found = {}
    for method in ("GET", "HEAD", "PUT"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(method, path)
        response = connection.getresponse()
        found[method] = response.status, response.read() == b"", response.headers["allow"]
        connection.close()
    assert found == {"GET": (200, False, None), "HEAD": (200, True, None), "PUT": (405, False, "GET")}


def test_who_hangs_up_hangs_up_on_the_server(two: Any) -> None:
    servers, port, balancer = two
    body = json.dumps({"prompt": "the", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    fields = (
        "POST /v1/completions HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(body)}",
    )
    head = "\r\n".join((*fields, "", ""))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + body)
        assert b"200" in connection.recv(100)
        assert sum(balancer.open) == 1
    for server in servers:
        server.wait_until_idle()
    until = time.monotonic() + 20
    while sum(balancer.open) and time.monotonic() < until:
        time.sleep(0.01)
    assert balancer.open == [0, 0]


def test_bodies_that_begin_alike_go_to_one_server_unless_it_is_busy() -> None:
    balancer = Balancer([1, 2, 3])
    bodies = [f"{number}".encode() * 600 for number in range(40)]
    usual = [balancer.choose(body) for body in bodies]
    assert set(usual) == {0, 1, 2}
    assert [balancer.choose(body + b"more") for body in bodies] == usual
    balancer.open[usual[0]] = SLACK
    assert balancer.choose(bodies[0]) == usual[0]
    balancer.open[usual[0]] = SLACK + 1
    assert balancer.choose(bodies[0]) != usual[0]
    balancer.open = [3, 1, 2]
    assert balancer.choose(b"") == 1


def test_a_server_that_is_gone_is_an_error_with_a_sentence() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with balanced([unused.getsockname()[1]]) as (port, _):
            with pytest.raises(openai.InternalServerError, match="does not answer"):
                client(port).completions.create(model="tiny", prompt="x")
            assert fetched(port, "/health")[0] == 503


@contextmanager
def breaking_off(kind: str) -> Iterator[int]:
    """A server that is gone after the first piece of its answer."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(head.encode() + b"a\r\ndata: {}\n\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        thread.join(timeout=30)


def test_an_answer_that_breaks_off_is_not_taken_for_whole() -> None:
    with breaking_off("text/event-stream; charset=utf-8") as gone, balanced([gone]) as (port, _):
        pieces = client(port).completions.create(model="tiny", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="does not answer"):
            list(pieces)
    cut = pytest.raises(http.client.IncompleteRead)
    with breaking_off("application/json") as gone, balanced([gone]) as (port, _), cut:
        fetched(port, "/v1/models")


def test_copies_are_started_without_the_balancers_options() -> None:
    given = ["serve", "m", "--replicas", "2", "--port=9", "--host", "0.0.0.0", "--name", "x", "--replicas=2"]
    assert without_own(given) == ["serve", "m", "--name", "x"]


@pytest.mark.parametrize(
    ("visible", "shares"),
    [
        (None, ["0,1", "2,3"]),
        ("4,5,6,7", ["4,5", "6,7"]),
        ("7, 2,0 ,5,1", ["7,2", "0,5"]),
        ("GPU-a,GPU-b,GPU-c,GPU-d", ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
    ],
)
def test_copies_share_the_cards_that_are_visible(
    visible: str | None, shares: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes in the copies' place print which cards they see."""
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    start, seen = subprocess.Popen, list[str]()

    def printing(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        return start(["printenv", VISIBLE], stdout=subprocess.PIPE, **settings)

    def wait(copies: list[subprocess.Popen[bytes]], ports: list[int]) -> None:
        seen.extend(copy.communicate()[0].decode().strip() for copy in copies)
        raise UserError("all have been seen")

    monkeypatch.setattr(subprocess, "Popen", printing)
    monkeypatch.setattr(replicas, "_wait_until_healthy", wait)
    with pytest.raises(UserError, match="all have been seen"):
        replicas.serve_replicas(["serve", "m"], ServerOptions(), replicas=2, cards=2, gpus=8)
    assert seen == shares


@pytest.mark.parametrize(("visible", "count"), [("4,5,6", "3 GPUs"), ("0,1,-1,3", "2 GPUs"), ("GPU-a", "1 GPU")])
def test_too_few_visible_cards_are_refused(visible: str, count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    with pytest.raises(UserError, match=f"is '{visible}', which names {count}, .*; name more cards or lower"):
        replicas.serve_replicas([], ServerOptions(), replicas=2, cards=2, gpus=int(count[0]))
