"""Tokenising once: exact contents, the cache, and what kills, races and damage do to it."""

import fcntl
import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.group import PRELOADED
from tests.train.jobs import tokenize_slowly
from tightfit.errors import UserError
from tightfit.launch.forked import start_server
from tightfit.models.text.tokenizer import Tokenizer, train_tokenizer
from tightfit.train.data import shards, texts
from tightfit.train.data.shards import prepare_chats, prepare_text
from tightfit.train.data.token_store import TokenStore

TEXTS = ["The quick brown fox", "", "jumps over the lazy dog.\n" * 3, "zwölf Boxkämpfer 😀"]


class Counting(Tokenizer):
    """Counts how many texts it was given."""

    seen = 0

    def encode_many(self, texts):  # type: ignore[no-untyped-def]
        self.seen += len(texts)
        return super().encode_many(texts)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 280)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def prepared(data: Path, tokenizer: Tokenizer, vocab_size: int = 280) -> TokenStore:
    return prepare_text([str(data)], tokenizer, cache_dir=data.parent / "cache", vocab_size=vocab_size)


def contents(store: TokenStore) -> list[list[int]]:
    return [store.document(i).tolist() for i in range(store.documents)]


def store_directory(data: Path) -> Path:
    (directory,) = (data.parent / "cache").glob("*/store")
    return directory


def test_every_document_is_its_tokens_and_the_end(data: Path, tokenizer: Tokenizer) -> None:
    store = prepared(data, tokenizer)
    assert contents(store) == [[*tokenizer.encode(text), tokenizer.eos_id] for text in TEXTS if text]
    assert store.slice(0, 4).dtype == np.uint16
    assert prepared(data, tokenizer, 70_000).slice(0, 4).dtype == np.uint32
    with pytest.raises(AssertionError):
        store.mask(0)


def test_batches_and_pieces_change_nothing(data: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = data.parent / "lines.txt"
    lines.write_text("".join(f"line {i} of a longer file\n" for i in range(100)))
    whole = prepared(lines, tokenizer)
    assert whole.documents == 1
    monkeypatch.setattr(texts, "PIECE_BYTES", 100)
    monkeypatch.setattr(shards, "BATCH_BYTES", 150)
    again = prepare_text([str(lines)], tokenizer, cache_dir=data.parent / "other", vocab_size=280, progress=True)
    assert contents(again) == contents(whole)
    assert again.fingerprint == whole.fingerprint


def test_the_second_time_nothing_is_tokenised(data: Path, tokenizer: Tokenizer) -> None:
    counting = Counting(tokenizer._wrapped)
    first = prepared(data, counting)
    second = prepared(data, counting)
    assert counting.seen == len(TEXTS)
    assert contents(first) == contents(second)
    data.write_text('{"text": "changed"}')
    assert contents(prepared(data, counting)) == [[*tokenizer.encode("changed"), tokenizer.eos_id]]
    other = train_tokenizer(["something else entirely"], 270)
    assert contents(prepared(data, other)) == [[*other.encode("changed"), other.eos_id]]


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest", "emptied"])
def test_a_damaged_store_is_made_again(data: Path, tokenizer: Tokenizer, damage: str) -> None:
    good = contents(prepared(data, tokenizer))
    directory = store_directory(data)
    match damage:
        case "truncated":
            os.truncate(directory / "tokens-00000.bin", 4)
        case "missing":
            (directory / "document_starts.npy").unlink()
        case "manifest":
            (directory / "manifest.json").write_text("{")
        case "emptied":
            for path in directory.iterdir():
                path.unlink()
    assert contents(prepared(data, tokenizer)) == good
    assert [path.name for path in sorted(directory.parent.iterdir())] == ["lock", "store"]


def test_chats_have_masks_over_the_answers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"question": "Who?", "answer": "The fox"}, {"question": "Over?", "answer": "The dog"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = prepare_chats([str(tmp_path)], tokenizer, cache_dir=tmp_path / "cache", vocab_size=280, progress=True)
    assert store.documents == 2
    for index, row in enumerate(rows):
        messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        ids, mask = tokenizer.encode_chat(messages)
        assert store.document(index).tolist() == ids
        assert store.mask(index).tolist() == mask
        answer = tokenizer.decode(store.document(index)[store.mask(index)].tolist())
        assert answer.startswith(row["answer"])
        assert row["question"] not in answer


def test_a_conversation_the_template_refuses_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"messages": [{"role": "assistant", "content": "unasked"}]}]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]))
    with pytest.raises(UserError, match=r"a\.jsonl line 1 cannot be tokenized: .*begins with an assistant"):
        prepare_chats([str(tmp_path / "a.jsonl")], tokenizer, cache_dir=tmp_path / "cache", vocab_size=280)


def test_ids_beyond_the_model_are_refused_when_made_and_when_found_again(data: Path, tokenizer: Tokenizer) -> None:
    expected = (
        r"data\.jsonl line \d contains token \d+, but the model has a vocabulary of 100 and the tokenizer one of 280"
    )
    with pytest.raises(UserError, match=expected):
        prepared(data, tokenizer, 100)
    assert not list((data.parent / "cache").glob("*/store"))
    prepared(data, tokenizer, 280)
    with pytest.raises(UserError, match=expected):
        prepared(data, tokenizer, 100)


def test_data_without_any_token_is_refused(data: Path, tokenizer: Tokenizer) -> None:
    data.write_text('{"text": ""}\n{"text": ""}\n')
    with pytest.raises(UserError, match=r"there are no tokens in .*data\.jsonl; give data that contains text"):
        prepared(data, tokenizer)


def test_a_cache_that_cannot_be_written_is_named(data: Path, tokenizer: Tokenizer) -> None:
    (data.parent / "cache").write_text("a file where the directory should be")
    with pytest.raises(
        UserError, match=r"the token cache .*cache cannot be written \(.*\); free space there or choose"
    ):
        prepared(data, tokenizer)


def test_errors_leave_nothing_behind(data: Path, tokenizer: Tokenizer) -> None:
    with data.open("a") as file:
        file.write("{broken")
    with pytest.raises(UserError, match="line 5 is not valid JSON"):
        prepared(data, tokenizer)
    assert list((data.parent / "cache").iterdir()) == []


def start(data: Path, tokenizer: Tokenizer, seconds_per_text: float) -> tuple[BaseProcess, Connection]:
    """A process that tokenizes, and the end of a pipe to receive its fingerprint from."""
    if not (data.parent / "tokenizer").exists():  # of which another process may be reading
        tokenizer.save(data.parent / "tokenizer")
    start_server(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    given = (data, data.parent / "tokenizer", seconds_per_text, theirs)
    process = context.Process(target=tokenize_slowly, args=given)
    process.start()
    theirs.close()
    return process, ours


def wait_for(pattern: str, directory: Path) -> None:
    deadline = time.monotonic() + 60
    while not list(directory.glob(pattern)):
        assert time.monotonic() < deadline, f"{pattern} never appeared"
        time.sleep(0.02)


def test_a_kill_leaves_no_half_written_store(data: Path, tokenizer: Tokenizer) -> None:
    process, _ = start(data, tokenizer, 60.0)
    wait_for("cache/*/.partial-*/tokens-00000.bin", data.parent)
    process.kill()
    process.join()
    assert not list((data.parent / "cache").glob("*/store"))
    assert list((data.parent / "cache").glob("*/.partial-*"))
    assert contents(prepared(data, tokenizer)) == [
        [*tokenizer.encode(text), tokenizer.eos_id] for text in TEXTS if text
    ]
    assert not list((data.parent / "cache").glob("*/.*"))


def test_two_processes_at_once_both_get_the_store(data: Path, tokenizer: Tokenizer) -> None:
    both = [start(data, tokenizer, 0.3) for _ in range(2)]
    sent = [found.recv() for _, found in both]
    for process, _ in both:
        process.join()
    assert [process.exitcode for process, _ in both] == [0, 0]
    assert sent == [prepared(data, tokenizer).fingerprint] * 2
    assert sorted(path.name for path in store_directory(data).parent.iterdir()) == ["lock", "store"]


def test_without_locks_the_first_rename_wins(data: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    class Overtaken(Tokenizer):
        def encode_many(self, texts):  # type: ignore[no-untyped-def]
            self.rival = prepared(data, tokenizer)
            return super().encode_many(texts)

    monkeypatch.setattr(fcntl, "flock", no_locks)
    late = Overtaken(tokenizer._wrapped)
    assert contents(prepared(data, late)) == contents(late.rival)
    assert sorted(path.name for path in store_directory(data).parent.iterdir()) == ["lock", "store"]
