"""Closes connections on which no request comes: uvicorn waits for the rest of a request's head without end, and every
open connection takes one of the files that a process may have open. Nothing is written to connections that are lost."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


class UntilLost:
    """A connection's transport that drops what is written once the connection is lost. A stream may have several pieces
    ready before it hears of that, and asyncio logs such writes as warnings."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send `data`."""
        if not self._transport.is_closing():
            self._transport.write(data)


def timely(head_seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which closes a connection whose next request has not sent its head after `head_seconds`."""

    class TimelyProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(UntilLost(transport))
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                self._forget_deadline()
            elif self.cycle is None or self.cycle.response_complete:
                self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_deadline()
            super().connection_lost(exc)

        def _expect_head(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(head_seconds, self.transport.close)

        def _forget_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return TimelyProtocol
