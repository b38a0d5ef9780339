"""The files of a store: what is written is what is read, across shard borders, and damage is noticed."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from tightfit.train.data.shard_writer import ShardWriter
from tightfit.train.data.token_store import DamagedStoreError, Recipe, TokenStore, open_store


def recipe(kind: str = "text", dtype: str = "uint16") -> Recipe:
    return Recipe(kind=kind, field=None, tokenizer="t", eos_id=None, dtype=dtype, sources=())  # type: ignore[arg-type]


def write(directory: Path, documents: list[list[int]], tokens_per_shard: int, made: Recipe) -> TokenStore:
    directory.mkdir()
    writer = ShardWriter(directory, made, tokens_per_shard)
    for number, tokens in enumerate(documents):
        mask = [token % 2 == 1 for token in tokens] if made.kind == "chats" else None
        writer.add(tokens, f"document {number}", mask)
        writer.end_document()
    writer.finish()
    return open_store(directory)


@pytest.mark.parametrize(("dtype", "limit"), [("uint16", 2**16), ("uint32", 2**17)])
def test_reading_gives_back_what_was_written(tmp_path: Path, dtype: str, limit: int) -> None:
    chance = random.Random(1)
    for trial, size in enumerate([1, 2, 3, 7, 64, 1000]):
        documents = [[chance.randrange(limit) for _ in range(chance.randrange(1, 12))] for _ in range(20)]
        store = write(tmp_path / str(trial), documents, size, recipe("chats", dtype))
        flat = [token for document in documents for token in document]
        assert (store.documents, store.tokens_total) == (20, len(flat))
        assert store.document_starts.tolist() == [0, *np.cumsum([len(document) for document in documents]).tolist()]
        for index, document in enumerate(documents):
            assert store.document(index).tolist() == document
            assert store.mask(index).tolist() == [token % 2 == 1 for token in document]
        for _ in range(50):
            start, stop = sorted(chance.choices(range(len(flat) + 1), k=2))
            assert store.slice(start, stop).tolist() == flat[start:stop]
        assert store.slice(len(flat), len(flat)).tolist() == []
        assert store.manifest.largest_id == max(flat)
        assert store.document(int(store.manifest.largest_id_where.split()[1])).max() == max(flat)


def test_documents_come_in_pieces_and_empty_ones_leave_no_trace(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, recipe())
    for tokens, ends in [([], True), ([1, 2], False), ([3], False), ([], True), ([4], True), ([], True)]:
        writer.add(tokens, "somewhere")
        if ends:
            writer.end_document("somewhere", eos_id=9)
    writer.finish()
    store = open_store(tmp_path)
    assert [store.document(i).tolist() for i in range(store.documents)] == [[1, 2, 3, 9], [4, 9]]


def test_the_fingerprint_follows_the_tokens_and_not_the_files(tmp_path: Path) -> None:
    one = write(tmp_path / "a", [[1, 2], [3]], 2, recipe())
    same = write(tmp_path / "b", [[1, 2], [3]], 100, recipe())
    other_border = write(tmp_path / "c", [[1], [2, 3]], 2, recipe())
    other_token = write(tmp_path / "d", [[1, 2], [4]], 2, recipe())
    assert one.fingerprint == same.fingerprint
    assert len({store.fingerprint for store in (one, other_border, other_token)}) == 3


def test_damage_is_noticed(tmp_path: Path) -> None:
    store = write(tmp_path / "whole", [[1, 2, 3], [4, 5]], 2, recipe("chats"))
    names = [*store.manifest.files, "manifest.json"]
    assert len(names) == 3 + 3 + 2
    for name in names:
        for trial, damage in enumerate([b"", None, "short", "long"]):
            copy = tmp_path / f"{name}-{trial}"
            copy.mkdir()
            for path in (tmp_path / "whole").iterdir():
                (copy / path.name).write_bytes(path.read_bytes())
            content = (copy / name).read_bytes()
            if damage is None:
                (copy / name).unlink()
            else:
                (copy / name).write_bytes({b"": b"", "short": content[:-3], "long": content + b"\0\0"}[damage])
            with pytest.raises(DamagedStoreError):
                open_store(copy)
    with pytest.raises(FileNotFoundError):
        open_store(tmp_path / "nowhere")
    starts = tmp_path / "whole" / "document_starts.npy"
    content = starts.read_bytes()
    for old, new in ((b"(3,)", b"(3,("), (b"{'descr", b"{{descr"), (b"'<i8'", b"'<i8\n")):
        assert old in content
        starts.write_bytes(content.replace(old, new, 1))
        with pytest.raises(DamagedStoreError):
            open_store(tmp_path / "whole")


@pytest.mark.parametrize("change", [{"tokens_total": 6}, {"documents": 1}, {"tokens_per_shard": 3}, {"files": "x"}])
def test_a_manifest_that_does_not_fit_is_noticed(tmp_path: Path, change: dict[str, object]) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4, 5]], 2, recipe())
    path = tmp_path / "a" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DamagedStoreError):
        open_store(tmp_path / "a")


def test_equal_recipes_share_a_key_and_others_do_not() -> None:
    made = recipe()
    others = [
        made.model_copy(update=change)
        for change in ({"kind": "chats"}, {"field": "body"}, {"tokenizer": "u"}, {"eos_id": 1}, {"dtype": "uint32"})
    ] + [made.model_copy(update={"sources": (("a.txt", 1, size),)}) for size in (1, 2)]
    assert recipe().key == made.key
    assert len({made.key, *(other.key for other in others)}) == 1 + len(others)
