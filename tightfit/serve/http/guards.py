"""Checks before the routes: the API key, how much a body may hold, how long a client may take to send it.

A server on loopback alone also checks the Host header. A site can have its own name point to 127.0.0.1 (DNS rebinding);
a browser then takes this server for a part of that site, and sends the requests of the site's pages with its name.
"""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from tightfit.serve.http.answers import error_body
from tightfit.serve.http.crowded import crowded

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What a client may ask of the server."""

    api_key: str | None = None
    names: frozenset[str] = frozenset()
    """Host names that requests without a key may name; empty: any."""
    body_bytes: int = 8 * 2**20
    head_seconds: float = 30.0
    """Until a connection has sent the head of a request (timely.py)."""
    body_seconds: float = 30.0
    request_seconds: float = 600.0
    requests: int = 512


class RefusedError(Exception):
    """A request that is refused before it reaches a route."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind


class Guards:
    """ASGI middleware; /v1, /stats and /metrics need the key, the page and /health do not."""

    def __init__(self, app: Any, limits: ServerLimits) -> None:
        self.app, self.limits = app, limits

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # uvicorn, which has a scope of its own, leaves the body out
            scope = {**scope, "method": "GET"}
        try:
            self._check_name(scope)
            self._check_key(scope)
            body = await self._read(scope, receive) if scope["method"] == "POST" else None
        except RefusedError as refused:
            await _answer(send, refused)
            return
        await self._run(scope, receive if body is None else _replayed(body, receive), send)

    async def _run(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Have the request answered; it is cancelled where the server ends before the answer does."""
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except asyncio.CancelledError:
            if not begun:  # a stream breaks off, which its client sees
                await _answer(send, RefusedError(503, "the server ends before this answer does", "server_error"))

    def _check_name(self, scope: MutableMapping[str, Any]) -> None:
        names, given = self.limits.names, dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
        called = given if given.endswith("]") else given.rpartition(":")[0] or given
        if names and self.limits.api_key is None and given and called not in names:
            raise RefusedError(
                403, f"this server is for its own machine, not for {called!r}; call it 127.0.0.1, or give it --api-key"
            )

    def _check_key(self, scope: MutableMapping[str, Any]) -> None:
        key = self.limits.api_key
        if key is None or not scope["path"].startswith(("/v1", "/metrics", "/stats")):
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, f"Bearer {key}".encode()):
            raise RefusedError(401, "the API key is missing or wrong", "authentication_error")

    async def _read(self, scope: MutableMapping[str, Any], receive: Receive) -> bytes:
        _check_kind(scope)
        stated = dict(scope["headers"]).get(b"content-length", b"0")
        if stated.isdigit() and int(stated) > self.limits.body_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RefusedError(400, "the client has gone")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self.limits.body_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise RefusedError(408, f"the body did not come within {self.limits.body_seconds:g} s") from None
        body = b"".join(parts)
        if (why := crowded(body)) is not None:
            raise RefusedError(400, why)
        return body

    def _too_large(self) -> RefusedError:
        return RefusedError(413, f"the body is larger than {self.limits.body_bytes} bytes")


def _check_kind(scope: MutableMapping[str, Any]) -> None:
    """Refuse bodies not declared as JSON: another site's page may send other types without a CORS preflight."""
    given = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RefusedError(415, f"content-type is {given!r}; send JSON and say so: application/json")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body in one message, then the connection's next messages."""
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _answer(send: Send, refused: RefusedError) -> None:
    body = json.dumps(error_body(refused.message, refused.kind)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.status in (408, 413, 415):
        headers.append((b"connection", b"close"))  # the rest of the body is still on its way
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
