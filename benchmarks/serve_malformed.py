"""Thousands of malformed requests to a running server: every one gets a 4xx with a sentence, none a 5xx or silence.

A request is made from a seed: a good body with one thing wrong (a type, a range, a name, a piece cut out of the JSON),
or bytes that were never a body, or a method or path that is not there.

    python -m benchmarks.serve_malformed --port 8000 --requests 10000 --record
"""

import argparse
import http.client
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.rows import append_row

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
WRONG: tuple[Any, ...] = ("hot", [], {}, [1], {"a": 1}, [[]], "1e999x")
NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "max_tokens",
    "priority",
)
RANGES: dict[str, tuple[Any, ...]] = {
    "temperature": (-1, 1e9),
    "top_p": (0, -0.5, 1.5),
    "top_k": (-1,),
    "min_p": (-1, 2),
    "typical_p": (0, 2),
    "repetition_penalty": (0, -1, 1e4),
    "presence_penalty": (-1e3, 1e3),
    "frequency_penalty": (1e5,),
    "seed": (-(2**70), 2**70),
    "n": (0, -1, 1000),
    "max_tokens": (0, -5),
    "priority": (10**6,),
    "stop": ([""], ["a"] * 99),
    "model": ("no-such-model", "\u0000"),
    "logit_bias": ({"-1": 1}, {"x": 1}, {"5": "y"}),
    "guided_regex": ("(", "[z-a]"),
    "guided_json": ("{", {"type": 7}),
    "guided_grammar": ("not a grammar :::",),
    "response_format": ({"type": "xml"}, {"type": "json_schema"}, {}),
    "stream_options": ("x",),
    "stream": ("maybe", 7),
}
Made = tuple[str, str, bytes]
"""Method, path and body."""


def good(path: str) -> dict[str, Any]:
    """A body that would be answered."""
    if path.endswith("embeddings"):
        return {"input": "the quick"}
    if path.endswith("chat/completions"):
        return {"messages": [{"role": "user", "content": "the quick"}], "max_tokens": 2}
    return {"prompt": "the quick", "max_tokens": 2}


def wrong_type(chance: random.Random) -> Made:
    """A number that is none."""
    path = chance.choice(PATHS[:2])
    return "POST", path, _json(good(path) | {chance.choice(NUMBERS): chance.choice(WRONG)})


def out_of_range(chance: random.Random) -> Made:
    """A value that no request may have."""
    path, name = chance.choice(PATHS[:2]), chance.choice(list(RANGES))
    return "POST", path, _json(good(path) | {name: chance.choice(RANGES[name])})


def cut(chance: random.Random) -> Made:
    """A body that ends too soon."""
    path = chance.choice(PATHS)
    body = _json(good(path))
    return "POST", path, body[: chance.randrange(len(body))]


def noise(chance: random.Random) -> Made:
    """Bytes; the first is none that JSON begins with."""
    return "POST", chance.choice(PATHS), b"\xff" + chance.randbytes(chance.randrange(400))


def not_an_object(chance: random.Random) -> Made:
    """JSON of another kind, or nested without end."""
    depth = chance.randrange(1, 5000)
    bodies = (b"[]", b"null", b"7", b'"text"', b"[" * depth, b'{"prompt":' * depth, b"[" * depth + b"]" * depth, b"NaN")
    return "POST", chance.choice(PATHS), chance.choice(bodies)


def wrong_content(chance: random.Random) -> Made:
    """Prompts, messages and inputs that are none."""
    bad: dict[str, tuple[Any, ...]] = {
        "/v1/completions": (
            {"prompt": []},
            {"prompt": [[]]},
            {"prompt": [10**9]},
            {"prompt": [-1]},
            {"prompt": 7},
            {"prompt": None},
            {"prompt": {"a": 1}},
            {"prompt": ["a"] * 99},
            {"prompt": "a " * 5000},
            {"prompt": "x", "logprobs": 99},
            {"prompt": "x", "logprobs": -1},
        ),
        "/v1/chat/completions": (
            {"messages": []},
            {"messages": "x"},
            {},
            {"messages": [7]},
            {"messages": [{}]},
            {"messages": [{"role": "user", "content": 7}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            {"messages": good(PATHS[1])["messages"], "tool_choice": "required"},
            {"messages": good(PATHS[1])["messages"], "tools": [{"type": "x"}]},
            {"messages": good(PATHS[1])["messages"], "logprobs": True, "top_logprobs": 99},
        ),
        "/v1/embeddings": (
            {"input": []},
            {"input": [10**9]},
            {"input": None},
            {},
            {"input": ["a"] * 99},
            {"input": "x", "dimensions": 3},
            {"input": "x", "encoding_format": "hex"},
        ),
    }
    path = chance.choice(PATHS)
    return "POST", path, _json(chance.choice(bad[path]))


def elsewhere(chance: random.Random) -> Made:
    """A method or a path that is not there."""
    method = chance.choice(("GET", "PUT", "DELETE", "PATCH", "OPTIONS"))
    path = chance.choice((*PATHS, "/v1/nothing", "/v1/models/no-such-model", "/%00", "/../../etc/passwd", "/v1//x"))
    return method, path, b""


KINDS: tuple[Callable[[random.Random], Made], ...] = (
    wrong_type,
    out_of_range,
    out_of_range,
    cut,
    noise,
    not_an_object,
    wrong_content,
    wrong_content,
    elsewhere,
)


def malformed(seed: int) -> Made:
    """The request of a seed."""
    chance = random.Random(seed)
    return chance.choice(KINDS)(chance)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def statuses(port: int, seeds: range) -> Counter[int]:
    """How often each status came; a connection that is dropped without an answer is status 0."""
    found: Counter[int] = Counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for seed in seeds:
        method, path, body = malformed(seed)
        try:
            connection.request(method, path, body or None, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            status = answer.status
        except (OSError, http.client.HTTPException):
            status = 0
            connection.close()
        found[status] += 1
        if not 400 <= status < 500:
            print(f"seed {seed}: {status} for {method} {path} {body[:200]!r}")
    connection.close()
    return found


def main() -> None:
    """Ask, record, check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--record", action="store_true", help="add the row to results/serve_malformed.csv")
    arguments = parser.parse_args()
    found = statuses(arguments.port, range(arguments.requests))
    refused = sum(count for status, count in found.items() if 400 <= status < 500)
    row = {"requests": arguments.requests, "refused_4xx": refused, "other": arguments.requests - refused}
    print(row, dict(found))
    if arguments.record:
        append_row("serve_malformed", row | {"statuses": " ".join(f"{s}:{n}" for s, n in sorted(found.items()))})
    assert row["other"] == 0


if __name__ == "__main__":
    main()
