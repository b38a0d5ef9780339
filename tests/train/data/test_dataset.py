"""Rows: every token counts once, documents stay apart, conversations teach answers only, held-out parts stay out."""

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tightfit.errors import UserError
from tightfit.train.data.dataset import PackedChats, PackedText, fitting_window
from tightfit.train.data.held_out import everything, split
from tightfit.train.data.shard_writer import ShardWriter
from tightfit.train.data.token_store import Recipe, TokenStore, open_store

IGNORE = -100


def make_store(
    directory: Path, documents: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]] | None = None
) -> TokenStore:
    kind = "text" if masks is None else "chats"
    recipe = Recipe(kind=kind, field=None, tokenizer="t", eos_id=None, dtype="uint16", sources=())  # type: ignore[arg-type]
    directory.mkdir(parents=True)
    writer = ShardWriter(directory, recipe, tokens_per_shard=17)
    for index, tokens in enumerate(documents):
        writer.add(tokens, str(index), None if masks is None else masks[index])
        writer.end_document()
    writer.finish()
    return open_store(directory)


def random_documents(seed: int, count: int, longest: int) -> list[list[int]]:
    """Documents of distinct tokens, so that a token says where it comes from."""
    chance = random.Random(seed)
    fresh = iter(range(1, 60_000))
    return [[next(fresh) for _ in range(chance.randint(1, longest))] for _ in range(count)]


def flat(documents: Sequence[Sequence[int]]) -> list[int]:
    return [token for document in documents for token in document]


def labels_of(dataset: PackedText | PackedChats) -> list[int]:
    return [label for i in range(len(dataset)) for label in dataset[i]["labels"].tolist() if label != IGNORE]


@pytest.mark.parametrize("sequence_length", [2, 3, 8, 50, 1000])
@pytest.mark.parametrize("separate", [True, False])
def test_every_token_is_a_label_once(tmp_path: Path, sequence_length: int, separate: bool) -> None:
    for seed in range(5):
        documents = random_documents(seed, 12, 20)
        store = make_store(tmp_path / str(seed), documents)
        dataset = PackedText(store, sequence_length, separate_documents=separate)
        stream = flat(documents)
        assert labels_of(dataset) == (flat([document[1:] for document in documents]) if separate else stream[1:])
        inputs = torch.cat([dataset[i]["tokens"] for i in range(len(dataset))])
        read = min(len(stream), len(inputs))
        assert inputs[:read].tolist() == stream[:read]
        assert len(inputs) >= len(stream) - 1
        assert not inputs[read:].any()


def test_rows_have_shifted_labels_and_numbered_documents(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", [[1, 2, 3], [4], [5, 6, 7, 8]])
    separate, joined = PackedText(store, 5), PackedText(store, 5, separate_documents=False)
    assert separate[0]["tokens"].tolist() == joined[0]["tokens"].tolist() == [1, 2, 3, 4, 5]
    assert separate[0]["labels"].tolist() == [2, 3, IGNORE, IGNORE, 6]
    assert joined[0]["labels"].tolist() == [2, 3, 4, 5, 6]
    assert separate[0]["documents"].tolist() == [0, 0, 0, 1, 2]
    assert joined[0]["documents"].tolist() == [0] * 5
    assert separate[1]["tokens"].tolist() == [6, 7, 8, 0, 0]
    assert separate[1]["labels"].tolist() == [7, 8, IGNORE, IGNORE, IGNORE]
    assert separate[1]["documents"].tolist() == joined[1]["documents"].tolist() == [0, 0, 0, 1, 1]
    row = separate[0]
    assert (row["tokens"].dtype, row["labels"].dtype, row["documents"].dtype) == (torch.int64, torch.int64, torch.int32)
    assert len(separate) == 2
    for outside in (2, -1):
        with pytest.raises(IndexError):
            separate[outside]


def test_a_row_without_any_label_is_never_added_at_the_end(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", [[1, 2, 3, 4, 5]])
    assert len(PackedText(store, 4)) == 1
    assert PackedText(store, 4)[0]["labels"].tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("held_out", [0.001, 0.1, 0.5, 0.99])
def test_a_split_covers_everything_once_and_takes_from_everywhere(tmp_path: Path, held_out: float) -> None:
    documents = random_documents(3, 100, 9)
    store = make_store(tmp_path / "a", documents)
    train, kept = split(store, held_out, seed=5, sequence_length=8)
    assert kept is not None
    ours, theirs = train.documents_of(store).tolist(), kept.documents_of(store).tolist()
    assert sorted(ours + theirs) == list(range(100))
    assert len(theirs) == min(max(1, round(held_out * 100)), 99)
    for part, chosen in ((train, ours), (kept, theirs)):
        if sum(len(documents[i]) for i in chosen) > len(chosen):
            assert labels_of(PackedText(store, 8, part=part)) == flat([documents[i][1:] for i in chosen])
    if held_out == 0.5:
        assert 15 < sum(i < 50 for i in theirs) < 35
        other = split(store, held_out, seed=6, sequence_length=8)[1]
        assert other is not None
        assert other.documents_of(store).tolist() != theirs


def test_two_documents_are_split_one_to_one(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", [[1, 2], [3, 4]])
    for share in (0.01, 0.9):
        train, kept = split(store, share, seed=0, sequence_length=8)
        assert kept is not None
        assert len(train.documents_of(store)) == len(kept.documents_of(store)) == 1


@pytest.mark.parametrize("tokens", [10, 33, 41, 400])
def test_a_single_document_gives_up_its_last_windows(tmp_path: Path, tokens: int) -> None:
    stream = list(range(1, tokens + 1))
    store = make_store(tmp_path / "a", [stream])
    train, kept = split(store, 0.2, seed=0, sequence_length=8)
    assert kept is not None
    cut = int(train.spans[0, 1])
    windows = len(PackedText(store, 8))
    assert cut == 8 * (windows - max(1, round(0.2 * windows)))
    assert labels_of(PackedText(store, 8, part=train)) == stream[1:cut]
    assert labels_of(PackedText(store, 8, part=kept)) == stream[cut + 1 :]


def test_splits_that_cannot_be_are_refused(tmp_path: Path) -> None:
    short = make_store(tmp_path / "a", [[1, 2, 3]])
    with pytest.raises(UserError, match=r"a single document of 3 tokens, .* sequence length 8; give more data"):
        split(short, 0.1, seed=0, sequence_length=8)
    chat = make_store(tmp_path / "b", [list(range(50))], [[True] * 50])
    with pytest.raises(UserError, match="the data is a single conversation, which leaves nothing to hold out"):
        split(chat, 0.1, seed=0, sequence_length=8)
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(UserError, match=r"held_out is .*; give a share"):
            split(short, share, seed=0, sequence_length=8)
    whole, none = split(short, 0.0, seed=0, sequence_length=8)
    assert none is None
    assert whole.spans.tolist() == everything(short).spans.tolist() == [[0, 3]]


def test_text_that_leaves_nothing_to_predict_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", [[1], [2], [3]])
    with pytest.raises(UserError, match="3 tokens in 3 documents leave nothing to predict"):
        PackedText(store, 4)
    assert labels_of(PackedText(store, 4, separate_documents=False)) == [2, 3]
    for length in (1, 0, -3):
        with pytest.raises(UserError, match=f"sequence_length is {length}; it must be at least 2"):
            PackedText(store, length)


def random_chats(seed: int, count: int, longest: int) -> tuple[list[list[int]], list[list[bool]]]:
    chance = random.Random(seed)
    documents = [[0, *document] for document in random_documents(seed, count, longest)]
    masks = [[False, *(chance.random() < 0.5 for _ in document[1:])] for document in documents]
    for mask in masks:
        mask[chance.randrange(1, len(mask))] = True
    return documents, masks


def best_window(mask: list[bool], size: int) -> tuple[int, int]:
    """What `fitting_window` promises, by trying every window."""
    if len(mask) <= size:
        return 0, len(mask)
    plain = min(max(0, mask.index(True) - size // 2), len(mask) - size)
    found = []
    for stop in range(1, len(mask) + 1):
        first = max(0, stop - size)
        ends_answer = mask[stop - 1] and (stop == len(mask) or not mask[stop])
        is_whole = False in mask[first:stop] or first == 0
        if ends_answer and is_whole:
            found.append((sum(mask[first + 1 : stop]), -stop, first))
    if not found or 2 * max(found)[0] < sum(mask[plain + 1 : plain + size]):
        return plain, plain + size
    _, stop, first = max(found)
    return first, -stop


def test_a_conversation_that_is_cut_keeps_an_answer_s_end() -> None:
    def window(mask: str, size: int) -> tuple[int, int]:
        return fitting_window(np.array([letter == "a" for letter in mask]), size)

    assert window("qqaaqqaaaq", 6) == (3, 9), "the longer answer, with its question"
    assert window("qqaaaqqaqq", 6) == (0, 5), "the beginning up to the end of an answer"
    assert window("qqqqqqqqaa", 4) == (6, 10), "a late answer with the end of its question"
    assert window("qaaaaaaaaa", 4) == (0, 4), "an answer too long for any row keeps its beginning"
    assert window("qaqaaaaaaa", 6) == (0, 6), "a short answer does not stand for a long one"


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("sequence_length", [2, 7, 30, 64])
def test_exactly_the_answers_are_labels(tmp_path: Path, sequence_length: int, pack: bool) -> None:
    documents, masks = random_chats(sequence_length, 40, 30)
    dataset = PackedChats(make_store(tmp_path / "a", documents, masks), sequence_length, pack=pack)
    windows = [best_window(m, sequence_length + 1) for m in masks]
    answers = [
        [token for i, token in enumerate(d) if first < i < stop and m[i]]
        for d, m, (first, stop) in zip(documents, masks, windows, strict=True)
    ]
    assert sorted(labels_of(dataset)) == sorted(flat(answers))
    assert (
        dataset.lost_answer_tokens
        == dataset.answer_tokens - len(flat(answers))
        == sum(map(sum, masks)) - len(flat(answers))
    )
    long = [len(document) > sequence_length + 1 for document in documents]
    assert dataset.dropped == sum(not labels for labels in answers)
    assert dataset.truncated == sum(long) - dataset.dropped
    assert sorted(i for row in dataset.rows for i in row) == [i for i, labels in enumerate(answers) if labels]
    if not pack:
        assert all(len(row) == 1 for row in dataset.rows)
    elif sequence_length == 64:
        assert len(dataset) < 40 / 2


def test_a_packed_row_holds_whole_conversations_and_padding(tmp_path: Path) -> None:
    masks = [[False, False, True, True], [False, True]]
    dataset = PackedChats(make_store(tmp_path / "a", [[5, 6, 7, 8], [9, 3]], masks), 6)
    (row,) = (dataset[i] for i in range(len(dataset)))
    assert row["tokens"].tolist() == [5, 6, 7, 9, 0, 0]
    assert row["labels"].tolist() == [IGNORE, 7, 8, 3, IGNORE, IGNORE]
    assert row["documents"].tolist() == [0, 0, 0, 1, 2, 2]
    assert (row["tokens"].dtype, row["labels"].dtype, row["documents"].dtype) == (torch.int64, torch.int64, torch.int32)
    with pytest.raises(IndexError):
        dataset[1]


def test_conversations_follow_their_part(tmp_path: Path) -> None:
    documents, masks = random_chats(1, 30, 10)
    store = make_store(tmp_path / "a", documents, masks)
    train, kept = split(store, 0.3, seed=2, sequence_length=16)
    packed = [PackedChats(store, 16, part=part) for part in (train, kept)]
    ours, theirs = (sorted(i for row in rows.rows for i in row) for rows in packed)
    assert [each.answer_tokens for each in packed] == [sum(sum(masks[i]) for i in part) for part in (ours, theirs)]
    assert sorted(ours + theirs) == list(range(30))
    assert len(theirs) == 9


def test_late_answers_are_reached(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", [list(range(20))] * 3, [[False] * 19 + [True]] * 3)
    assert labels_of(PackedChats(store, 8)) == [19] * 3
    assert PackedChats(store, 8).truncated == 3
    assert PackedChats(store, 19).truncated == 0
    with pytest.raises(UserError, match="sequence_length is 1"):
        PackedChats(store, 1)


PROGRAM = """
import sys
from pathlib import Path
from tightfit.train.data.dataset import PackedChats
from tightfit.train.data.held_out import split
from tightfit.train.data.token_store import open_store

store = open_store(Path(sys.argv[1]))
train, kept = split(store, 0.3, seed=4, sequence_length=16)
print(PackedChats(store, 16, seed=4, part=train).rows, kept.spans.tolist())
"""


def test_packing_and_splitting_are_the_same_in_every_process(tmp_path: Path) -> None:
    documents, masks = random_chats(2, 40, 10)
    make_store(tmp_path / "a", documents, masks)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "a")]
    printed = subprocess.check_output(command, text=True, env=os.environ | {"PYTHONHASHSEED": "1"})
    store = open_store(tmp_path / "a")
    train, kept = split(store, 0.3, seed=4, sequence_length=16)
    assert kept is not None
    assert printed == f"{PackedChats(store, 16, seed=4, part=train).rows} {kept.spans.tolist()}\n"
    assert PackedChats(store, 16, seed=5, part=train).rows != PackedChats(store, 16, seed=4, part=train).rows
