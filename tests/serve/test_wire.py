"""What clients do to connections: other methods than POST, requests one behind the other, heads that never end."""

import asyncio
import contextlib
import http.client
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.serve.running import CONFIG, Running, serving
from tightfit.models.loading import LoadedModel
from tightfit.serve.http.guards import ServerLimits
from tightfit.serve.http.server import PatientServer, ServerOptions, listening_config
from tightfit.serve.http.timely import UntilLost

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
BEGUN = (b"", b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: ")


@pytest.fixture(scope="module")
def hasty(loaded: LoadedModel) -> Iterator[Running]:
    """A server that waits half a second for a head."""
    with serving(loaded, CONFIG, ServerLimits(head_seconds=0.5)) as made:
        yield made


def connected(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def answered(server: Running) -> socket.socket:
    """A connection on which one answer has come; on a busy machine half a second may be over before that is asked."""
    while True:
        connection = connected(server)
        try:
            connection.sendall(HEALTH)
            if connection.recv(2**16).startswith(b"HTTP/1.1 200"):
                return connection
        except OSError:
            pass
        connection.close()


def ask(server: Running, method: str, path: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(method, path, headers={"origin": "http://elsewhere"})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


@pytest.mark.parametrize("path", ["/", "/health", "/stats", "/metrics", "/v1/models", "/v1/models/tiny"])
def test_what_can_be_read_has_a_head(server: Running, path: str) -> None:
    whole, body = ask(server, "GET", path)
    head, nothing = ask(server, "HEAD", path)
    assert (whole.status, head.status, nothing) == (200, 200, b"")
    if path not in ("/stats", "/metrics"):  # whose numbers go on
        assert head.headers["content-length"] == str(len(body))


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("OPTIONS", "/v1/chat/completions", "POST"),
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/health", "GET"),
    ],
)
def test_other_methods_are_told_which_there_are(server: Running, method: str, path: str, allowed: str) -> None:
    """And a page of another site may not read what is here: nothing says that it may."""
    response, body = ask(server, method, path)
    assert (response.status, response.headers["allow"]) == (405, allowed)
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert not [name for name in response.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_what_does_not_say_that_it_is_json_is_told_so(server: Running, kind: str) -> None:
    """Which browsers let any page send, and curl does by itself."""
    for said, status in ((kind, 415), ("Application/JSON; charset=utf-8", 200), ("application/vnd.api+json", 200)):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1}', {"content-type": said})
        response = connection.getresponse()
        told = json.loads(response.read())
        connection.close()
        assert response.status == status
        assert status == 200 or "application/json" in told["error"]["message"]


def test_the_list_of_models_may_end_in_a_slash(server: Running) -> None:
    assert ask(server, "GET", "/v1/models/")[1] == ask(server, "GET", "/v1/models")[1]


def test_the_schema_says_each_operation_once(server: Running) -> None:
    paths = json.loads(ask(server, "GET", "/openapi.json")[1])["paths"]
    names = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(names) == len(set(names)) == len(paths)


def test_requests_one_behind_the_other_are_answered_in_turn(server: Running) -> None:
    """A stream first: what follows waits for its end."""
    body = json.dumps({"prompt": "a", "max_tokens": 4, "stream": True, "temperature": 0}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(post + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        received = b"".join(iter(partial(connection.recv, 2**16), b""))
    stream, _, health = received.partition(b"[DONE]")
    assert stream.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 200" in health
    assert health.endswith(b'{"status":"ok"}')


def test_a_head_that_does_not_end_is_not_waited_for(hasty: Running) -> None:
    """Neither on a new connection nor after an answer, whose rest may still come; then it is closed."""
    waiting = [(connected(hasty), begun) for begun in BEGUN]
    waiting += [(answered(hasty), begun) for begun in BEGUN[1:]]
    for connection, begun in waiting:
        with contextlib.suppress(OSError):  # closed before it was begun
            connection.sendall(begun)
    for connection, _ in waiting:
        with connection, contextlib.suppress(ConnectionError):
            assert b"".join(iter(partial(connection.recv, 2**16), b"")) in (b"", b'{"status":"ok"}')


def test_a_second_signal_ends_the_application_too() -> None:
    """In order, and not by cancelling it, of which uvicorn writes a traceback."""
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while not heard or heard[-1] != "lifespan.shutdown":
            heard.append((await receive())["type"])
            await send({"type": f"{heard[-1]}.complete"})

    server = PatientServer(listening_config(app, ServerOptions(port=0)))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    for _ in range(2):
        server.handle_exit(signal.SIGINT, None)
    thread.join(timeout=30)
    assert heard == ["lifespan.startup", "lifespan.shutdown"]


def test_pieces_for_who_has_gone_are_dropped_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream may write several before it hears that its client has gone; asyncio warns from the fifth on."""
    warned: list[str] = []
    monkeypatch.setattr(logging.getLogger("asyncio"), "warning", warned.append)

    async def write(wrapped: bool) -> None:
        ours, _ = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        writer: Any = UntilLost(transport) if wrapped else transport
        transport.abort()
        for _ in range(10):
            writer.write(b"data: ")

    asyncio.run(write(wrapped=True))
    assert not warned
    asyncio.run(write(wrapped=False))
    assert warned


def test_an_answer_may_take_longer_than_a_head(hasty: Running) -> None:
    """As long as it likes: the body of this request begins after its head was whole, and comes a second later."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with answered(hasty) as connection:
        connection.sendall(head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body))
        time.sleep(1)
        connection.sendall(body)
        assert b"HTTP/1.1 200" in b"".join(iter(partial(connection.recv, 2**16), b""))
