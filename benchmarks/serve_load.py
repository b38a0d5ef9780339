"""A server under load from many streams for minutes: none lost, none mixed up, memory flat.

Starts `tightfit serve MODEL` on a free loopback port and keeps `--streams` streams open for `--seconds`. Every prompt's
greedy answer is asked for alone beforehand: whatever comes under load must be that, whole. Some clients hang up early,
some ask nonsense. Then SIGTERM: the server must end with status 0 and hold no block of the cache. Its resident memory
is sampled; after the first third of the time it may not grow by more than `GROWTH`.

Products of other row counts round otherwise, so where two tokens are almost equally likely a large model's answer may
differ in company though nothing was mixed up: `--batch-invariant` serves without that, and every difference is a fault.

    python -m benchmarks.serve_load smollm2-135m-instruct --streams 500 --seconds 300 --batch-invariant
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rows import append_row

PROMPTS = 40
TOKENS = (4, 32)
GROWTH = 1.05
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Seen:
    """What clients have met."""

    counts: Counter[str] = field(default_factory=Counter)
    resident_bytes: list[int] = field(default_factory=list)
    longest_s: float = 0.0


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def stats(port: int) -> dict[str, Any]:
    """The server's own numbers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats", timeout=120) as response:
        return dict(json.loads(response.read()))


def prompt_of(index: int) -> tuple[str, int]:
    """A prompt and how many tokens its answer has."""
    chance = random.Random(index)
    return f"Number {chance.randrange(10**6)} and number {chance.randrange(10**6)}:", chance.randint(*TOKENS)


async def stream(port: int, body: dict[str, Any], leave_after: int | None = None) -> tuple[int, str, bool]:
    """Status, text and whether the stream came to its end; hangs up after `leave_after` pieces."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1",
            "host: 127.0.0.1",
            "content-type: application/json",
            "connection: close",
        )
        writer.write("\r\n".join((*head, "connection: close", f"content-length: {len(data)}", "", "")).encode() + data)
        status = int((await reader.readline()).split()[1])
        text, pieces = "", 0
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                return status, text, True
            if line.startswith(b"data: "):
                text += "".join(choice["text"] for choice in json.loads(line[6:]).get("choices", []))
                pieces += 1
                if leave_after is not None and pieces >= leave_after:
                    return status, text, False
        return status, text, False
    finally:
        writer.close()


def greedy(index: int) -> dict[str, Any]:
    """The request for one prompt."""
    prompt, tokens = prompt_of(index)
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}


async def one_client(port: int, until: float, seed: int, wanted: list[str], seen: Seen) -> None:
    """Asks one thing after the other."""
    chance = random.Random(seed)
    while time.monotonic() < until:
        index = chance.randrange(PROMPTS)
        kind = chance.random()
        began = time.monotonic()
        if kind < 0.05:
            status, _, _ = await stream(port, greedy(index) | {"max_tokens": 0})
            seen.counts["refused" if status == 400 else f"failed: nonsense got {status}"] += 1
        elif kind < 0.15:
            status, text, _ = await stream(port, greedy(index), leave_after=2)
            seen.counts[
                "hung up" if status == 200 and wanted[index].startswith(text) else f"failed: left {status}"
            ] += 1
        else:
            status, text, over = await stream(port, greedy(index))
            seen.counts[_judged(status, text, over, wanted[index])] += 1
            seen.longest_s = max(seen.longest_s, time.monotonic() - began)


def _judged(status: int, text: str, over: bool, wanted: str) -> str:
    if status != 200:
        return f"failed: status {status}"
    if not over:
        return "failed: lost"
    return "right" if text == wanted else "failed: mixed up"


async def watch(process: int, until: float, seen: Seen) -> None:
    """Sample the server's resident memory every two seconds."""
    while time.monotonic() < until:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        seen.resident_bytes.append(pages * PAGE_BYTES)
        await asyncio.sleep(2)


async def alone(port: int, body: dict[str, Any]) -> str:
    """What the server says to nobody but this client: what is compared with has to be an answer, and whole."""
    status, text, over = await stream(port, body)
    if status != 200 or not over:
        raise SystemExit(f"the server gave {body['prompt']!r} alone status {status}{'' if over else ' and no end'}")
    return text


async def everyone(port: int, process: int, streams: int, seconds: float) -> Seen:
    """All clients at once, after each prompt was asked alone."""
    wanted = [await alone(port, greedy(index)) for index in range(PROMPTS)]
    assert len(set(wanted)) > PROMPTS // 4, "the prompts' answers are too alike to tell a mix-up"
    seen = Seen()
    until = time.monotonic() + seconds
    clients = (one_client(port, until, seed, wanted, seen) for seed in range(streams))
    await asyncio.gather(watch(process, until, seen), *clients)
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


def measure(model: str, streams: int, seconds: float, *, batch_invariant: bool = False) -> dict[str, Any]:
    """Start, load, stop; what was seen, as a row."""
    port = free_port()
    command = [sys.executable, "-m", "tightfit", "serve", model, "--port", str(port), "--name", "loaded"]
    command += ["--batch-invariant"] * batch_invariant
    server = subprocess.Popen([*command, "--max-requests", str(2 * streams), "--max-seconds", "3600"])
    try:
        wait_for(port, server)
        seen = asyncio.run(everyone(port, server.pid, streams, seconds))
        until = time.monotonic() + 60
        while stats(port)["cache_blocks_used"] and time.monotonic() < until:
            time.sleep(0.2)
        last = stats(port)
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(timeout=120)
    settled = seen.resident_bytes[len(seen.resident_bytes) // 3 :] or [1]
    return {
        "model": Path(model).name,
        "streams": streams,
        "seconds": seconds,
        "batch_invariant": batch_invariant,
        "right": seen.counts["right"],
        "hung_up": seen.counts["hung up"],
        "refused": seen.counts["refused"],
        "failed": sum(count for name, count in seen.counts.items() if name.startswith("failed")),
        "answer_tokens": last["answer_tokens"],
        "preemptions": last["preemptions"],
        "longest_answer_s": round(seen.longest_s, 1),
        "resident_mib_settled": round(settled[0] / 2**20),
        "resident_mib_last": round(settled[-1] / 2**20),
        "blocks_left": last["cache_blocks_used"],
        "exit_status": status,
    } | {"failures": "; ".join(f"{name} {n}" for name, n in seen.counts.items() if name.startswith("failed"))}


def main() -> None:
    """Measure, record, check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--batch-invariant", action="store_true", help="serve the same bits in any company")
    parser.add_argument("--record", action="store_true", help="add the row to results/serve_load.csv")
    arguments = parser.parse_args()
    row = measure(arguments.model, arguments.streams, arguments.seconds, batch_invariant=arguments.batch_invariant)
    print(json.dumps(row))
    if arguments.record:
        append_row("serve_load", row)
    assert row["failed"] == 0, row["failures"]
    assert row["right"] > 0
    assert row["blocks_left"] == 0
    assert row["exit_status"] == 0
    assert row["resident_mib_last"] <= GROWTH * row["resident_mib_settled"]


if __name__ == "__main__":
    main()
