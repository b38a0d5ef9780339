"""Inputs that once took gigabytes or hours, each in a process of bounded memory: now they do not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.covering import sampled, thorough
from tests.fuzz.lanes import run_cases
from tests.fuzz.materials import CHAT, Materials
from tightfit.errors import UserError
from tightfit.models.gguf.tokenizer import read_tokenizer
from tightfit.models.text.tokenizer import load_tokenizer
from tightfit.train.data.rows import read_rows
from tightfit.train.data.shards import prepare_chats, prepare_text
from tightfit.train.data.sources import Source

Work = Callable[[Materials, Path], object]


def row_of(text: str) -> Work:
    """A JSON line with a single large text, tokenized whole."""

    def work(given: Materials, folder: Path) -> None:
        (folder / "rows.jsonl").write_text(json.dumps({"text": text}))
        store = prepare_text([str(folder / "rows.jsonl")], given.tokenizer, cache_dir=folder / "cache", vocab_size=300)
        assert store.documents == 1
        assert store.tokens_total > 10**6

    return work


def refused(words: str, work: Work) -> Work:
    def checked(given: Materials, folder: Path) -> None:
        with pytest.raises(UserError, match=words):
            work(given, folder)

    return checked


def parquet(rows: int, size: int, *, nested: bool = False, **options: Any) -> Work:
    """Equal large strings, which take next to nothing in the file."""

    def work(given: Materials, folder: Path) -> None:
        path = folder / "rows.parquet"
        text = "x " * (size // 2)
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
        column = {"messages": [chat] * 20} if nested else {"text": [text] * 20}
        table = pyarrow.table(column)
        with pyarrow.parquet.ParquetWriter(path, table.schema, **options) as writer:
            for _ in range(rows // 20):
                writer.write_table(table)
        assert path.stat().st_size < 10**6
        assert sum(1 for _ in read_rows(Source(path, "parquet"), list(column))) == rows

    return work


def tokenizer_with(**parts: Any) -> Work:
    def work(given: Materials, folder: Path) -> None:
        given.tokenizer.save(folder)
        content = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps({**content, **parts}))
        load_tokenizer(folder).encode("a" * 1000)

    return work


def added(index: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"added_tokens": [{"id": index, "content": "<|endoftext|>", "special": True, **flags}]}


def split(pattern: str) -> dict[str, Any]:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": step}


def vocabulary(tokens: list[str]) -> Work:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(-len(token)) for token in tokens],
    }
    return lambda given, folder: read_tokenizer(metadata, folder / "x.gguf").encode("aaa")


def long_chat(given: Materials, folder: Path) -> None:
    row = {"messages": [*CHAT, {"role": "user", "content": "a b " * 10**7}, CHAT[1]]}
    (folder / "chats.jsonl").write_text(json.dumps(row))
    prepare_chats([str(folder / "chats.jsonl")], given.tokenizer, cache_dir=folder / "cache", vocab_size=300)


def template(text: str) -> Work:
    """Met by plain sampling as well, which asks the template how an answer ends."""

    def work(given: Materials, folder: Path) -> None:
        given.tokenizer.save(folder)
        (folder / "chat_template.jinja").write_text(text)
        loaded = load_tokenizer(folder)
        assert loaded.stop_ids == {loaded.eos_id}
        loaded.encode_chat(CHAT)

    return work


DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
DOUBLINGS = {"type": "Sequence", "normalizers": [DOUBLING] * 40}
LOOPS = "{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3
LONG_LINE = 60_000_000
BOUNDS: dict[str, Work] = {
    "a row of 12 MB": row_of("word and " * (12_000_000 // 9)),
    "a line of 60 MB": refused("longer than 50,000,000 bytes", row_of("x" * LONG_LINE)),
    "400 equal strings of 4 MB": parquet(400, 4_000_000, compression="zstd"),
    "400 strings of 4 MB written out": parquet(400, 4_000_000, compression="zstd", use_dictionary=False),
    "400 equal chats of 4 MB": parquet(400, 4_000_000, nested=True, compression="zstd"),
    "a conversation of 40 MB": refused("shorten or remove it", long_chat),
    "a token of 2 MB": refused("with a token of 2,000,000", vocabulary(["a", "a" * 2_000_000])),
    "3,000 tokens that grow": refused("the most are", vocabulary(["a" * n for n in range(1, 3000)])),
    "300 tokens that grow": vocabulary(["a" * n for n in range(1, 300)]),
    "1,000 tokens that grow": refused("in too many ways", vocabulary(["a" * n for n in range(1, 1000)])),
    "an id of 2³¹": refused("gives a token the id 2147483648", tokenizer_with(**added(2**31))),
    "forty doublings": refused("times as long", tokenizer_with(normalizer=DOUBLINGS)),
    "an expression without end": refused("nested repetitions", tokenizer_with(**split(r"(a+)+$"))),
    "another": refused("nested repetitions", tokenizer_with(**split(r"(a|a)*b"))),
    "an expression nobody knows, but good": tokenizer_with(**split(r"\p{L}{1,4}|\s|.")),
    "a template that multiplies": refused("chat template", template("{{ 'a' * 10**10 }}")),
    "a template that loops": refused("chat template", template(LOOPS)),
}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    made = Materials(tmp_path_factory.mktemp("bounds"))
    assert made.tokenizer
    return made


SLOW = ("a row of 12 MB", "400 strings of 4 MB written out", "400 equal chats of 4 MB", "another")


@sampled(5)
@pytest.mark.parametrize("name", [thorough(name) if name in SLOW else name for name in BOUNDS])
def test_bounded(given: Materials, name: str) -> None:
    kinds = {name: lambda _, given, folder: lambda: BOUNDS[name](given, folder)}
    assert [each.what for each in run_cases(kinds, [0], 0, given)] == [""]
