"""A server under load from many streams for minutes: clients that read, hang up, ask nonsense and wait.

Starts `tightfit serve MODEL` on a free loopback port, keeps `--streams` streams open for `--seconds`, then stops it
with SIGTERM. It must answer throughout, end with status 0, and hold no block of the cache once everybody is gone.

    python -m benchmarks.serve_load smollm2-135m-instruct --streams 500 --seconds 300
"""

import argparse
import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from typing import Any

import openai


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def stats(port: int) -> dict[str, Any]:
    """The server's own numbers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats", timeout=30) as response:
        return dict(json.loads(response.read()))


async def one_client(client: openai.AsyncOpenAI, model: str, until: float, seed: int, seen: Counter[str]) -> None:
    """Asks one thing after the other."""
    chance = random.Random(seed)
    while time.monotonic() < until:
        try:
            if chance.random() < 0.1:
                await client.completions.create(model=model, prompt="x", max_tokens=0)
            stream = await client.completions.create(
                model=model, prompt=f"Number {chance.randrange(1000)}:", max_tokens=chance.randint(1, 64), stream=True
            )
            leaves = chance.random() < 0.2
            async for _ in stream:
                seen["events"] += 1
                if leaves and chance.random() < 0.2:
                    await stream.close()
                    seen["hung up"] += 1
                    break
            seen["streams"] += 1
        except openai.BadRequestError:
            seen["refused"] += 1
        except openai.RateLimitError:
            seen["too many"] += 1
            await asyncio.sleep(chance.random())
        except openai.APIError as error:
            seen[f"failed: {type(error).__name__}"] += 1


async def everyone(port: int, model: str, streams: int, seconds: float) -> Counter[str]:
    """All clients at once."""
    seen: Counter[str] = Counter()
    until = time.monotonic() + seconds
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0) as client:
        await asyncio.gather(*(one_client(client, model, until, seed, seen) for seed in range(streams)))
    return seen


def wait_for(port: int, server: "subprocess.Popen[bytes]") -> None:
    """Until the server answers."""
    while server.poll() is None:
        try:
            stats(port)
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not start")


def main() -> None:
    """Start, load, stop, check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=300)
    arguments = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "tightfit", "serve", arguments.model, "--port", str(port), "--name", "loaded"]
    server = subprocess.Popen([*command, "--max-requests", str(arguments.streams)])
    try:
        wait_for(port, server)
        seen = asyncio.run(everyone(port, "loaded", arguments.streams, arguments.seconds))
        until = time.monotonic() + 60
        while stats(port)["cache_blocks_used"] and time.monotonic() < until:
            time.sleep(0.2)
        last = stats(port)
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(timeout=120)
    print(dict(seen), {key: last[key] for key in ("requests", "finished", "answer_tokens", "preemptions")})
    failed = [name for name in seen if name.startswith("failed")]
    assert not failed, failed
    assert last["cache_blocks_used"] == 0
    assert status == 0, status


if __name__ == "__main__":
    main()
