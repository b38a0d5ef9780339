"""Texts as vectors: by WordLlama, whose package carries its weights, or by the server's own /v1/embeddings.

WordLlama (static embeddings of 256 numbers, 16 MB) was made for retrieval. A language model's mean-pooled states were
not, and find less; they need no further package.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

Embed = Callable[[list[str]], list[list[float]]]
AT_ONCE = 32


def wordllama() -> Embed | None:
    """The sentence encoder from PyPI, where it is installed."""
    try:
        import wordllama as package
    except ModuleNotFoundError:
        return None
    # Its own folder as the cache: there the tokenizer lies that it would otherwise look for on the network.
    model = package.WordLlama.load(cache_dir=Path(package.__file__).parent, disable_download=True)
    return lambda texts: [[float(x) for x in row] for row in model.embed(texts, norm=True)]


def served(url: str) -> Embed:
    """The vectors of the model that is served at `url`."""

    def embed(texts: list[str]) -> list[list[float]]:
        made: list[list[float]] = []
        for at in range(0, len(texts), AT_ONCE):
            found = post(f"{url}/v1/embeddings", {"input": texts[at : at + AT_ONCE]})
            made += [row["embedding"] for row in found["data"]]
        return made

    return embed


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a server answers to `body`."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return dict(json.loads(response.read()))
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url} answers with status {error.code}: {error.read().decode(errors='replace')}") from None
    except (OSError, ValueError) as error:
        raise SystemExit(f"no model server answers at {url} ({error}); start one with `tightfit serve`") from None
