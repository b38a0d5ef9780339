"""A real server on a loopback port, in a thread."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import openai
import uvicorn

from tightfit.models.loading import LoadedModel
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.http.app import Served, make_app
from tightfit.serve.http.guards import ServerLimits
from tightfit.serve.http.server import ServerOptions, listening_config
from tightfit.serve.service import Service

CONFIG = EngineConfig(max_sequences=16, step_tokens=64, block_size=4, cache_bytes=2**20)


@dataclass
class Running:
    """Where a server listens, and what it runs."""

    port: int
    service: Service
    server: uvicorn.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_until_idle(self, seconds: float = 20) -> None:
        """Until nobody holds a block: what a client that hung up leaves behind is nothing."""
        engine, until = self.service.engine, time.monotonic() + seconds
        while engine.pool.used or engine.has_work or self.service.open_requests:
            assert time.monotonic() < until, "blocks are still held"
            time.sleep(0.01)


@contextmanager
def running(loaded: LoadedModel, engine: Engine, limits: ServerLimits | None = None) -> Iterator[Running]:
    """A server of `engine` until the block is left."""
    limits = limits or ServerLimits()
    service = Service(engine, most_requests=limits.requests)
    assert loaded.tokenizer is not None
    listening = socket.socket(proto=socket.IPPROTO_TCP)  # else asyncio does not know it for one, and lets it delay
    listening.bind(("127.0.0.1", 0))
    app = make_app(Served("tiny", service, loaded.tokenizer, limits))
    server = uvicorn.Server(listening_config(app, ServerOptions(drain_seconds=5, limits=limits)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < until, "the server did not start"
        time.sleep(0.01)
    try:
        yield Running(listening.getsockname()[1], service, server)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        listening.close()
        assert not thread.is_alive()


@contextmanager
def serving(loaded: LoadedModel, config: EngineConfig, limits: ServerLimits | None = None) -> Iterator[Running]:
    """A server of `loaded` until the block is left, when nobody may hold anything and nothing may have failed."""
    with running(loaded, Engine(loaded.model, loaded.tokenizer, config), limits) as made:
        yield made
        made.wait_until_idle()
        assert made.service.failure is None


def client_of(server: Running) -> openai.OpenAI:
    """The official client."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
