"""What clients do to connections: other methods than POST, requests one behind the other, heads that never end."""

import http.client
import json
import socket
from collections.abc import Iterator

import pytest

from tests.serve.running import Running, serving
from tests.serve.test_server import CONFIG
from tightfit.models.loading import LoadedModel
from tightfit.serve.http.guards import ServerLimits

HEAD_SECONDS = 0.3


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Running]:
    with serving(loaded, CONFIG, ServerLimits(head_seconds=HEAD_SECONDS)) as made:
        yield made


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
        received = b"".join(iter(lambda: connection.recv(2**16), b""))
    stream, _, health = received.partition(b"[DONE]")
    assert stream.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 200" in health
    assert health.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("begun", [b"", b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: "])
def test_a_head_that_does_not_end_is_not_waited_for(server: Running, begun: bytes) -> None:
    """Neither of a new connection nor after an answer; that nothing comes back is all that is waited for."""
    whole = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for before in (b"", whole) if begun else (b"",):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            if before:
                connection.sendall(before)
                assert connection.recv(2**16).startswith(b"HTTP/1.1 200")
            connection.sendall(begun)
            assert b"".join(iter(lambda: connection.recv(2**16), b"")) in (b"", b'{"status":"ok"}')


def test_an_answer_may_take_longer_than_a_head(server: Running) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 500, "ignore_eos": True, "n": 4}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    assert (response.status, len(json.loads(response.read())["choices"])) == (200, 4)
