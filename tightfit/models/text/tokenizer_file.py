"""Checks of a tokenizer.json before the tokenizers library reads it, which trusts it.

The library allocates by the largest id, applies replacements one after the other however much each adds, and runs
regular expressions that can run forever or crash the process. So here ids, sizes and the growth of texts are checked in
the JSON, and unknown expressions are tried once, in a child process with a limit on time and memory, on texts on which
such expressions take longest.
"""

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tightfit.bounded_files import read_json, require_regular
from tightfit.errors import UserError

LARGEST_BYTES = 64 * 2**20
"""Gemma-3's, the largest published, has 33 MB."""
LARGEST_ID = 2**24
LONGEST_TOKEN = 4096
MOST_STEPS = 64
"""The most steps of normalizing, splitting and decoding together."""
MOST_GROWTH = 16.0
"""How many times longer all replacements together may make a text."""
GROWTHS = {"NFKD": 3.0, "NFKC": 3.0, "ByteLevel": 2.0, "Prepend": 1.0}
TRIAL_SECONDS = 5.0
TRIAL_BYTES = 2**31
TRIAL_CHARACTERS = 20_000
KNOWN_PATTERNS = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
        " {2,}",
        r"\p{N}{1,3}",
    }
)
"""GPT-2's, Llama-3's, Qwen's and T5's expressions, which need no trial."""
TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SIDE_FILES = (
    SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "vocab.json",
    "chat_template.jinja",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "config.json",
)
"""Files that transformers reads beside tokenizer.json."""


def check_tokenizer_files(directory: Path) -> None:
    """Refuse files that would take too much time or memory; other mistakes the library finds itself."""
    for path in (directory / name for name in (*SIDE_FILES, TOKENIZER)):
        if path.exists() and _size(path) > LARGEST_BYTES:
            raise UserError(f"{path} is larger than {LARGEST_BYTES >> 20} MiB, which no tokenizer's file is")
    if (directory / SETTINGS).exists():
        _read_object(directory / SETTINGS)
    path = directory / TOKENIZER
    if not path.exists():
        return
    content = _read_object(path)
    _check_vocabulary(content, path)
    steps = [step for part in ("normalizer", "pre_tokenizer", "decoder") for step in _steps(content.get(part))]
    _check_steps(steps, path)
    unknown = [pattern for pattern in _patterns(steps) if pattern not in KNOWN_PATTERNS]
    if unknown and not survives(lambda: _try(path, unknown), TRIAL_SECONDS, TRIAL_BYTES):
        raise UserError(
            f"{path} splits or replaces by {unknown[0][:80]!r}, which takes more than {TRIAL_SECONDS:.0f} s or fails "
            f"on {TRIAL_CHARACTERS:,} characters; use an expression without nested repetitions"
        )


def _size(path: Path) -> int:
    try:
        return require_regular(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; get or write it again") from None


def _read_object(path: Path) -> dict[str, Any]:
    content = read_json(path, LARGEST_BYTES, "a tokenizer", remedy="get or write it again")
    if not isinstance(content, dict):
        raise UserError(f"{path} is not the description of a tokenizer; get or write it again")
    return content


def _check_vocabulary(content: dict[str, Any], path: Path) -> None:
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = content.get("added_tokens")
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    ids = [entry.get("id") for entry in entries]
    tokens = [entry.get("content") for entry in entries]
    if isinstance(vocabulary, dict):
        ids += vocabulary.values()
        tokens += vocabulary.keys()
    elif isinstance(vocabulary, list):
        tokens += [entry[0] for entry in vocabulary if isinstance(entry, list) and entry]
    for index in ids:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < LARGEST_ID:
            raise UserError(f"{path} gives a token the id {index!r:.40}; ids lie between 0 and {LARGEST_ID - 1:,}")
    if any(isinstance(token, str) and len(token) > LONGEST_TOKEN for token in tokens):
        raise UserError(f"{path} has a token of more than {LONGEST_TOKEN:,} characters; get or write it again")


def _steps(node: Any) -> Iterator[dict[str, Any]]:
    """The steps of a sequence, however nested."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
            waiting += [inner for key in ("normalizers", "pretokenizers", "decoders") for inner in each.get(key) or []]


def _check_steps(steps: list[dict[str, Any]], path: Path) -> None:
    if len(steps) > MOST_STEPS:
        raise UserError(f"{path} handles text in {len(steps)} steps; the most are {MOST_STEPS}")
    growth = 1.0
    for step in steps:
        growth *= max(1.0, _growth(step))
    if growth > MOST_GROWTH:
        raise UserError(
            f"{path} replaces text by text up to {growth:,.0f} times as long; the most is {MOST_GROWTH:.0f} times"
        )


def _growth(step: dict[str, Any]) -> float:
    """How many times longer this step can make a text."""
    kind, content, pattern = step.get("type"), step.get("content"), step.get("pattern")
    if kind != "Replace" or not isinstance(content, str):
        return GROWTHS.get(kind, 1.0) if isinstance(kind, str) else 1.0
    text = pattern.get("String") if isinstance(pattern, dict) else None
    matched = len(text) if isinstance(text, str) else 1
    return len(content) / matched if matched else 1.0 + len(content)


def _patterns(steps: list[dict[str, Any]]) -> Iterator[str]:
    for step in steps:
        pattern = step.get("pattern")
        found = pattern.get("Regex") if isinstance(pattern, dict) else None
        if isinstance(found, str):
            yield found


def _try(path: Path, patterns: list[str]) -> None:
    """Tokenize texts on which weak expressions backtrack longest: repetitions whose ending does not match."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    letters = "".join(sorted({letter for pattern in patterns for letter in pattern if letter.isalnum()}))
    for word in ("a", " ", "1", "\n", "'", "ab", "a ", "é", "A1", "\t "):
        text = word * (TRIAL_CHARACTERS // len(word))
        for ending in ("", "!", "\x00", f"!{letters}"):
            tokenizer.encode(text + ending)


def survives(work: Callable[[], None], seconds: float, more_bytes: int) -> bool:
    """Whether `work` ends without an error in a child of this process, within so much processor time and memory."""
    child = os.fork()
    if child == 0:
        _work_and_exit(work, seconds, more_bytes)
    deadline = time.monotonic() + 10 * seconds  # generous, as the machine may be busy
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _work_and_exit(work: Callable[[], None], seconds: float, more_bytes: int) -> None:
    """In the child: do `work` with its output discarded, and exit without returning to the parent's program."""
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        limit = int(seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + more_bytes, hard))
        work()
        os._exit(0)
    except BaseException:
        os._exit(1)


def _data_bytes() -> int:
    """Bytes of this process's data and stack."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()
    return int(pages[5]) * resource.getpagesize()
