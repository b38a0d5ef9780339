"""Several servers of one model behind one address.

A request goes to the server that a hash of its body's beginning assigns to it, whose prefix cache may know that
beginning, unless that server has clearly more to do than another; then to the one with fewest open requests. Answers
are passed on as they come; a client that hangs up hangs up on its server. Metrics of all servers are added up.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from hashlib import blake2b
from typing import Any

import h11

from tightfit.serve.http.answers import error_body
from tightfit.serve.http.hang_up import Receive, until_gone
from tightfit.serve.http.metrics import written
from tightfit.serve.http.streaming import DONE

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
BEGINNING_BYTES = 512
"""Bytes of a body's beginning, whose hash assigns it to a server."""
SLACK = 2
"""How many more open requests than the least busy server the assigned one may have."""
CHUNK_BYTES = 2**16
HOP_BY_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"host", b"content-length"}


class Balancer:
    """An ASGI application in front of servers at `ports` of this machine."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.ports = list(ports)
        self.open = [0] * len(self.ports)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _lifespan(receive, send)
            return
        message = await receive()
        body: bytes = message.get("body", b"")
        if scope["path"] in ("/health", "/stats", "/metrics") and scope["method"] == "GET":
            await self._summed(scope, send)
            return
        chosen = self.choose(body)
        self.open[chosen] += 1
        try:
            await until_gone(receive, self._forward(self.ports[chosen], scope, body, send))
        finally:
            self.open[chosen] -= 1

    def choose(self, body: bytes) -> int:
        """Which server gets a request with this body."""
        least = min(range(len(self.open)), key=self.open.__getitem__)
        if not body:
            return least
        digest = blake2b(body[:BEGINNING_BYTES], digest_size=8).digest()
        usual = int.from_bytes(digest) % len(self.ports)
        return usual if self.open[usual] <= self.open[least] + SLACK else least

    async def _forward(self, port: int, scope: MutableMapping[str, Any], body: bytes, send: Send) -> None:
        kind = None
        try:
            async with contextlib.aclosing(_response_events(port, scope, body)) as events:
                async for event in events:
                    if isinstance(event, h11.Response):
                        headers = [(k, v) for k, v in event.headers if k not in HOP_BY_HOP]
                        kind = dict(headers).get(b"content-type", b"")
                        await send({"type": "http.response.start", "status": event.status_code, "headers": headers})
                    elif isinstance(event, h11.Data):
                        await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
        except (OSError, h11.RemoteProtocolError):
            return await _broken_off(send, kind)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _summed(self, scope: MutableMapping[str, Any], send: Send) -> None:
        """/health, /stats or /metrics over all servers: the worst health, the sums of numbers."""
        found = await asyncio.gather(*(_whole(port, scope) for port in self.ports))
        worst = max(status for status, _ in found)
        if worst >= 400 or scope["path"] == "/health":
            body = next(body for status, body in found if status == worst)
            return await _send(send, worst, body, b"application/json")
        if scope["path"] == "/stats":
            rows = [json.loads(body) for _, body in found]
            return await _answer(send, 200, {name: sum(row[name] for row in rows) for name in rows[0]})
        summed = _summed_metrics([body.decode() for _, body in found])
        await _send(send, 200, summed.encode(), b"text/plain; version=0.0.4")


def _summed_metrics(texts: list[str]) -> str:
    """Several servers' Prometheus texts as one, with the values of each metric added."""
    lines = [text.splitlines() for text in texts]
    summed = []
    for same in zip(*lines, strict=True):
        if same[0].startswith("#"):
            summed.append(same[0])
        else:
            summed.append(f"{same[0].split()[0]} {written(sum(float(line.split()[1]) for line in same))}")
    return "\n".join(summed) + "\n"


async def _response_events(port: int, scope: MutableMapping[str, Any], body: bytes) -> Any:
    """The h11 events of a server's answer; closing the generator early closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        connection = h11.Connection(h11.CLIENT)
        for event in _request(scope, body):
            writer.write(connection.send(event) or b"")
        await writer.drain()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(CHUNK_BYTES))
                continue
            if isinstance(event, h11.EndOfMessage):
                return
            yield event
    finally:
        writer.close()


def _request(scope: MutableMapping[str, Any], body: bytes) -> list[Any]:
    query = scope.get("query_string", b"")
    target = scope.get("raw_path", scope["path"].encode()) + (b"?" + query if query else b"")
    headers: Headers = [(name, value) for name, value in scope["headers"] if name.lower() not in HOP_BY_HOP]
    headers += [(b"host", b"127.0.0.1"), (b"connection", b"close"), (b"content-length", str(len(body)).encode())]
    request = h11.Request(method=scope["method"], target=target, headers=headers)
    return [request, *([h11.Data(data=body)] if body else []), h11.EndOfMessage()]


async def _whole(port: int, scope: MutableMapping[str, Any]) -> tuple[int, bytes]:
    status, parts = 503, []
    try:
        async with contextlib.aclosing(_response_events(port, scope, b"")) as events:
            async for event in events:
                if isinstance(event, h11.Response):
                    status = event.status_code
                else:
                    parts.append(bytes(event.data))
    except (OSError, h11.RemoteProtocolError):
        return 503, json.dumps({"status": "dead"}).encode()
    return status, b"".join(parts)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


async def _broken_off(send: Send, kind: bytes | None) -> None:
    """Tell the client that its server is gone: by a status where no response of some `kind` has begun, by an event in a
    stream of them, else by an end before the end."""
    gone = error_body("a server of this model does not answer", "server_error")
    if kind is None:
        return await _answer(send, 503, gone)
    if kind.startswith(b"text/event-stream"):
        await send({"type": "http.response.body", "body": f"data: {json.dumps(gone)}\n\n{DONE}".encode()})


async def _answer(send: Send, status: int, value: Any) -> None:
    await _send(send, status, json.dumps(value).encode(), b"application/json")


async def _send(send: Send, status: int, body: bytes, kind: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
