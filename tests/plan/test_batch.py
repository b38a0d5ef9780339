"""Global batches: tokens, rows, and how ranks work through them."""

import pytest

from tests.plan.questions import planned
from tightfit.counted import counted, counted_tokens
from tightfit.errors import UserError
from tightfit.hardware.sizes import parse_count
from tightfit.jobs.lever_table import describe_levers
from tightfit.jobs.levers import Levers
from tightfit.plan.batch import Batch, rows_of_tokens, split_rows, splits, warning


def test_61_million_tokens_are_1920_rows() -> None:
    """DeepSeek-V3: 1920 × 32 K, and 1920 = 16 × 120."""
    batch = Batch(sequence_length=32_000, micro=1, accumulation=16, ranks=120)
    assert batch.rows == 1920
    assert batch.tokens == 61_440_000
    assert rows_of_tokens(61_440_000, 32_000) == 1920
    assert split_rows(1920, 32_000, 1, 120) == batch
    assert split_rows(1920, 32_000, 4, 120).accumulation == 4
    assert "1,920 rows × 32,000 = 61.4 M tokens a step = micro-batch 1 × accumulation 16 × 120" in str(batch)


def test_counts_are_written_as_they_are_said() -> None:
    one = Batch(sequence_length=4096, micro=1, accumulation=1, ranks=1)
    assert str(one) == "1 row × 4,096 = 4,096 tokens a step = micro-batch 1 × accumulation 1 × 1 data rank"
    assert (counted(0, "row"), counted(1, "row"), counted(2_000, "row")) == ("0 rows", "1 row", "2,000 rows")
    assert (counted_tokens(1), counted_tokens(999_999), counted_tokens(10**6)) == (
        "1 token",
        "999,999 tokens",
        "1 M tokens",
    )
    assert describe_levers(Levers(loss_chunk_bytes=0)) == "smallest loss chunks"
    assert describe_levers(Levers(loss_chunk_bytes=2**19)) == "loss chunks of 0.5 MiB"
    assert describe_levers(Levers(num_checkpoints=1)) == "checkpoint 1 layer"


def test_tokens_become_rows_that_can_be_split() -> None:
    assert rows_of_tokens(16_000_000, 8192, 1024) == 2048  # 1953.1 rows
    assert rows_of_tokens(61_440_000, 32_000, 2048) == 1920  # a whole number stays
    assert rows_of_tokens(1000, 4096, 8) == 1
    assert rows_of_tokens(50_000, 4096, 64) == 16  # 12.2 rows, fewer than GPUs
    assert [(each.micro, each.accumulation) for each in splits(48, 512, 8)] == [(1, 6), (2, 3), (3, 2), (6, 1)]


def test_rows_that_do_not_divide_name_those_that_do() -> None:
    with pytest.raises(UserError, match="1900 is not a multiple of micro-batch 1 × 120 data ranks; take 1800 or 1920"):
        split_rows(1900, 32_000, 1, 120)
    with pytest.raises(UserError, match="take 8 rows"):
        split_rows(7, 512, 1, 8)
    with pytest.raises(UserError, match="--batch-tokens is 0"):
        rows_of_tokens(0, 512)


@pytest.mark.parametrize(
    ("tokens", "gpus", "said"),
    [
        (4_194_304, 1024, None),
        (61_440_000, 2048, None),
        (65_536, 1024, "less"),
        (200_000_000, 1024, "more"),
        (65_536, 8, None),
    ],
)
def test_unusual_batches_are_pointed_out(tokens: int, gpus: int, said: str | None) -> None:
    sentence = warning(tokens, gpus)
    assert (sentence is None) == (said is None)
    assert said is None or said in str(sentence)


def test_a_plan_works_through_exactly_its_batch() -> None:
    found = planned("llama-3.1-8b", "8xH100-80GB", 4096, 96)
    plan = found.plan
    micro_batches = 96 / (plan.layout.micro_batch * plan.layout.data)
    assert micro_batches == int(micro_batches)
    assert any("less than" in note for note in planned("llama-3.2-1b", "16x8xH100-80GB", 512, 128).notes)
    odd = planned("llama-3.2-1b", "8xH100-80GB", 512, 7)
    assert odd.plan.layout.data in (1, 7)
    assert any("7 rows is not a multiple of 8 GPUs" in note for note in odd.notes)


@pytest.mark.parametrize(
    ("text", "count"), [("4M", 4_000_000), ("15T", 15 * 10**12), ("1,024", 1024), ("2.3k", 2300), ("4k", 4000)]
)
def test_counts_as_people_write_them(text: str, count: int) -> None:
    assert parse_count(text, "--tokens") == count


@pytest.mark.parametrize("text", ["", "many", "4Q", "-3", "1.5", "1.0001k"])
def test_other_counts_are_a_sentence(text: str) -> None:
    with pytest.raises(UserError, match="--tokens is"):
        parse_count(text, "--tokens")
