"""Runs the server until it is told to stop: a signal lets open requests finish, a dead engine ends it with an error."""

import socket
import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import uvicorn

from tightfit.errors import UserError
from tightfit.models.loading import LoadedModel
from tightfit.serve.engine import Engine
from tightfit.serve.http.app import Served, make_app
from tightfit.serve.http.guards import ServerLimits
from tightfit.serve.http.timely import timely
from tightfit.serve.service import Service

DRAIN_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where to listen, and what clients may ask for."""

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    drain_seconds: int = DRAIN_SECONDS
    limits: ServerLimits = field(default_factory=ServerLimits)


class PatientServer(uvicorn.Server):
    """The first signal stops listening and lets open requests finish, the second ends them. uvicorn does not raise
    them again after its own end, so that engine and copies can be ended too."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Also end the application where answers are not waited for: uvicorn would cancel it, with a traceback."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()


class DrainingServer(PatientServer):
    """Also marks its service as draining."""

    service: Service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.draining = True
        super().handle_exit(sig, frame)


def listening_config(app: Any, options: ServerOptions) -> uvicorn.Config:
    """How uvicorn serves `app`."""
    return uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        http=timely(options.limits.head_seconds),
        log_level="warning",
        timeout_graceful_shutdown=options.drain_seconds,
        h11_max_incomplete_event_size=64 * 2**10,
    )


def serve(loaded: LoadedModel, engine: Engine, options: ServerOptions) -> None:
    """Serve until a signal comes; raises the engine's error if that ended it."""
    if loaded.tokenizer is None:
        raise UserError(f"{loaded.source} has no tokenizer, so it cannot be served")
    service = Service(engine, most_requests=options.limits.requests)
    servers: list[DrainingServer] = []

    def on_failure() -> None:
        servers[0].should_exit = True

    name = options.name or loaded.source
    app = make_app(Served(name, service, loaded.tokenizer, options.limits, on_failure))
    server = DrainingServer(listening_config(app, options))
    server.service = service
    servers.append(server)
    server.run()
    service.stop()
    if service.failure is not None:
        raise service.failure
    if not server.started:
        sys.exit(1)  # uvicorn has said why: most often the port is taken
