"""Cases of data: rows, texts and conversations, and stores of tokens."""

import gzip
import json
import random
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.fuzz.changing import changed_bytes, dumped, value, word
from tests.fuzz.materials import CHAT, TEXTS, Materials
from tightfit.train.data.chats import read_chats
from tightfit.train.data.shards import prepare_chats, prepare_text
from tightfit.train.data.sources import find_sources
from tightfit.train.data.texts import read_texts

Case = Callable[[], object]


def _consumed(path: Path, *, chats: bool) -> Case:
    def run() -> int:
        sources = find_sources([str(path)], rows_only=chats)
        return sum(1 for _ in (read_chats(sources) if chats else read_texts(sources)))

    return run


def _line(chance: random.Random, row: Any) -> bytes:
    return row if isinstance(row, bytes) else dumped(chance, row).replace(b"\n", b" ")


def json_lines(chance: random.Random, given: Materials, folder: Path) -> Case:
    """Rows of text."""
    rows: list[Any] = [{"text": chance.choice(TEXTS)} for _ in range(3)]
    long = json.dumps(
        {"text": chance.choice(("a", "é", "\n", "[]", " ")) * chance.choice((10, 10**5, 3 * 10**6))}
    ).encode()
    rows.insert(chance.randrange(4), chance.choice(({"text": value(chance)}, value(chance), {"txt": "x"}, long)))
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(_line(chance, row) for row in rows))
    return _consumed(path, chats=False)


def chats(chance: random.Random, given: Materials, folder: Path) -> Case:
    """Rows of conversations, tokenized."""
    turn = {"role": chance.choice(("user", "assistant", "tool", word(chance))), "content": value(chance)}
    row = chance.choice(
        ({"messages": [*CHAT, turn]}, {"conversations": [turn]}, {"messages": CHAT * 300}, value(chance))
    )
    path = folder / "chats.jsonl"
    path.write_bytes(_line(chance, {"messages": CHAT}) + b"\n" + _line(chance, row))
    cache = folder / "cache"
    return lambda: prepare_chats([str(path)], given.tokenizer, cache_dir=cache, vocab_size=300)


def plain_text(chance: random.Random, given: Materials, folder: Path) -> Case:
    """A file of text, tokenized."""
    content = chance.choice((b"a b ", b"\xff", b"\0", b"\n\n", "é ".encode(), b" ", b"word\n")) * chance.choice(
        (1, 50, 10**5)
    )
    path = folder / "notes.txt"
    path.write_bytes(changed_bytes(chance, content) if chance.random() < 0.5 else content)
    cache = folder / "cache"
    return lambda: prepare_text([str(path)], given.tokenizer, cache_dir=cache, vocab_size=chance.choice((300, 10)))


def json_document(chance: random.Random, given: Materials, folder: Path) -> Case:
    """A list of objects in one file, sometimes with an element that is large, deep, or never ends."""
    rows: list[Any] = [{"text": text} for text in TEXTS]
    rows.insert(chance.randrange(4), chance.choice((value(chance), {"text": value(chance)}, {"text": "é" * 3 * 10**6})))
    content = dumped(chance, chance.choice((rows, {"rows": rows}, rows[0])))
    content = chance.choice((content, content[:-1], content + b",", b"[" * chance.choice((1, 10**6)), b"[" + content))
    path = folder / "rows.json"
    path.write_bytes(content)
    return _consumed(path, chats=chance.random() < 0.3)


def _separated(chance: random.Random, delimiter: str) -> bytes:
    """A table with its names, of which some value is strange, or many, or without an end."""
    quote, names = chance.choice(('"', "", '"')), chance.choice((["text", "n"], ["n"], ["text"] * 3, [word(chance)]))
    values = [quote + chance.choice((*TEXTS, word(chance), "x" * 10**6)) + quote for _ in names]
    whole = "\n".join(delimiter.join(row) for row in (names, values, values))
    strange = (
        delimiter * 10**6,
        f'"a\n"{delimiter}' * 10**5,
        '"' + "a\n" * 10**6,
        delimiter.join(f"c{i}" for i in range(2 * 10**5)),
        "",
    )
    return (whole + chance.choice(("", "\n")) + chance.choice(strange)).encode("utf-8", "surrogatepass")


def separated_values(chance: random.Random, given: Materials, folder: Path) -> Case:
    """Comma- and tab-separated values."""
    suffix, delimiter = chance.choice((("csv", ","), ("tsv", "\t")))
    content = _separated(chance, delimiter)
    path = folder / f"rows.{suffix}"
    path.write_bytes(changed_bytes(chance, content) if chance.random() < 0.4 else content)
    return _consumed(path, chats=chance.random() < 0.2)


def compressed(chance: random.Random, given: Materials, folder: Path) -> Case:
    """What is inside is rows or text; much of it in few bytes, cut off, or damaged."""
    inner, content = chance.choice(
        (
            ("txt", chance.choice((b"\0", b"a b\n", b" ")) * chance.choice((10, 10**6, 2 * 10**7))),
            ("jsonl", b'{"text": "' + b"a" * chance.choice((10, 10**6, 10**6, 6 * 10**7)) + b'"}'),
            ("json", b"[" + b'{"text": "b"},' * 10**4 + b'{"text": "c"}]'),
            ("csv", _separated(chance, ",")),
        )
    )
    suffix = chance.choice(("gz", "zst") if find_spec("pyarrow") else ("gz",))
    made = gzip.compress(content, 1) if suffix == "gz" else _zstandard(content)
    path = folder / f"rows.{inner}.{suffix}"
    path.write_bytes(changed_bytes(chance, made) if chance.random() < 0.4 else made * chance.choice((1, 1, 3)))
    return _consumed(path, chats=False)


def _zstandard(content: bytes) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


def parquet(chance: random.Random, given: Materials, folder: Path) -> Case:
    """Parquet with wrong bytes, or with little bytes that mean much."""
    path = folder / "rows.parquet"
    if chance.random() < 0.8:
        path.write_bytes(changed_bytes(chance, given.parquet))
    else:
        import pyarrow
        import pyarrow.parquet

        texts = ["x" * chance.choice((10, 2_000_000))] * chance.choice((1, 40))
        codec = chance.choice(("none", "zstd", "snappy", "gzip"))
        table = pyarrow.table({"text": texts})
        pyarrow.parquet.write_table(table, path, compression=codec, use_dictionary=chance.random() < 0.5)
    return _consumed(path, chats=chance.random() < 0.3)


def saved_dataset(chance: random.Random, given: Materials, folder: Path) -> Case:
    """A directory that `datasets` did not quite write."""
    import datasets

    target = folder / "saved"
    datasets.Dataset.from_dict({"text": list(TEXTS)}).save_to_disk(str(target))
    path = chance.choice(sorted(path for path in target.rglob("*") if path.is_file()))
    path.write_bytes(changed_bytes(chance, path.read_bytes()))
    return _consumed(target, chats=False)


def token_store(chance: random.Random, given: Materials, folder: Path) -> Case:
    """A store in the cache that is damaged: it is made again."""
    (folder / "a.txt").write_text("\n".join(TEXTS))
    shutil.copytree(_stored(given), folder / "cache")
    stored = sorted(path for path in (folder / "cache").rglob("*") if path.is_file() and path.name != "lock")
    path = chance.choice(stored)
    path.write_bytes(changed_bytes(chance, path.read_bytes()))
    source = str(given.folder / "store" / "a.txt")

    def run() -> None:
        store = prepare_text([source], given.tokenizer, cache_dir=folder / "cache", vocab_size=300)
        assert sum(len(store.document(index)) for index in range(store.documents)) == store.tokens_total

    return run


def _stored(given: Materials) -> Path:
    folder = given.folder / "store"
    if not folder.exists():
        folder.mkdir()
        (folder / "a.txt").write_text("\n".join(TEXTS))
        prepare_text([str(folder / "a.txt")], given.tokenizer, cache_dir=folder / "cache", vocab_size=300)
    return folder / "cache"


KINDS = {
    "json lines": json_lines,
    "json document": json_document,
    "separated values": separated_values,
    "compressed": compressed,
    "chats": chats,
    "plain text": plain_text,
    **({"parquet": parquet} if find_spec("pyarrow") else {}),
    **({"saved dataset": saved_dataset} if find_spec("datasets") else {}),
    "token store": token_store,
}
