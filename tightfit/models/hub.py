"""Models on the Hugging Face hub: `hf:organisation/name`, or `hf:organisation/name@revision`.

What is downloaded is chosen by name: config, tokenizer and safetensors, never code or pickled weights. It goes through
huggingface_hub into that package's own cache, so nothing is fetched twice and a second run needs no network. A plan
downloads the config alone.
"""

import re
from pathlib import Path

from tightfit.errors import UserError

PREFIX = "hf:"
NAMED = re.compile(r"(?P<name>[\w.-]{1,96}/[\w.-]{1,96})(?:@(?P<revision>[\w./-]{1,200}))?", re.ASCII)
CONFIG = ["config.json"]
MODEL = [
    *CONFIG,
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja"),
    *("*.safetensors", "*.safetensors.index.json"),
]


def is_hub_name(source: str) -> bool:
    """Whether `source` asks for a model of the hub."""
    return source.startswith(PREFIX)


def hub_hint(source: str) -> str | None:
    """Advice for a `source` that is no file but looks like a name on the hub; else None."""
    return f"to download it from the Hugging Face hub, write {PREFIX}{source}" if NAMED.fullmatch(source) else None


def hub_directory(source: str, *, weights: bool) -> Path:
    """The local directory of a model of the hub, downloaded where it is not there: all of it, or the config alone."""
    found = NAMED.fullmatch(source.removeprefix(PREFIX))
    if found is None:
        raise UserError(f"{source!r:.200} is not a name on the hub; write {PREFIX}organisation/name")
    directory = _downloaded(found["name"], found["revision"], MODEL if weights else CONFIG)
    if not (directory / "config.json").is_file():
        raise UserError(f"{source} has no config.json, so it is not a model that can be loaded")
    if weights and not any(directory.glob("*.safetensors")):
        raise UserError(f"{source} has no .safetensors, and pickled weights are not loaded; convert it first")
    return directory


def _downloaded(name: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError:
        raise UserError(f"{PREFIX}{name} is downloaded with huggingface_hub: pip install huggingface_hub") from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        raise UserError(
            f"{name} wants its licence accepted: do so at https://huggingface.co/{name}, then run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"the hub has no {name}, or only for those who log in (`hf auth login`); check the name"
        ) from None
    except LocalEntryNotFoundError:
        raise UserError(
            f"{name} is not in the cache and the hub cannot be reached; download it where there is a network "
            f"(`hf download {name}`) and give the directory"
        ) from None
    except Exception as error:  # of many kinds: HTTP, sockets, a full disk
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{name} cannot be downloaded ({reason:.300}); try again, or give a directory") from None
