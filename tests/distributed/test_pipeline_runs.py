"""Whole runs of `tightfit train` on pipelines: they end as one process does, and go on where any layout stopped."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.covering import thorough
from tests.distributed.group import Group
from tests.distributed.test_runs import alone, assert_same_run, run_fields, write_again
from tests.train.jobs import checkpoint_files, tiny_job
from tightfit.jobs.job import Job
from tightfit.models.resolve import checkpoints_of
from tightfit.train.loop import run_job
from tightfit.train.metrics import METRICS_FILE, read_metrics

Make = Callable[[int], Group]
SMALL = {"source": "tiny-llama", "shape": {"layers": 4, "hidden_size": 32, "mlp_size": 48}}


@pytest.fixture
def make(tmp_path: Path, corpus: Path, token_cache: Path) -> Callable[..., Job]:
    def made(name: str, layout: dict[str, Any] | None = None, **changes: Any) -> Job:
        fields = {"layout": {"micro_batch": 1} | (layout or {}), "evaluation": {"max_rows": 5, "every": 2}, "steps": 4}
        fields |= {"optimizer": {"lr": 1e-3}, "model": SMALL} | changes
        return tiny_job(tmp_path / name, corpus, token_cache, **fields)

    return made


def run_on(group: Make, job: Job, **options: Any) -> list[dict[str, Any]]:
    return group(job.layout.ranks).run(run_fields, job.model_dump(mode="json"), options)


LAYOUTS = {
    "1f1b": {"pipeline": 2},
    "interleaved": {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2},
    "zero-1": {"pipeline": 2, "data": 2, "zero": 1, "schedule": "zero-bubble"},
    "tensor": {"pipeline": 2, "tensor": 2},
}
UNFLUSHED = {"pipeline": 2, "schedule": "2bw"}


@pytest.mark.parametrize("name", ["zero-1", *map(thorough, ("interleaved", "1f1b", "tensor"))])
def test_a_run_ends_as_one_process_s(group: Make, make: Callable[..., Job], name: str) -> None:
    job, one = make("many", LAYOUTS[name]), make("one")
    results = run_on(group, job)
    straight = alone(one)
    assert [result["rank"] for result in results] == list(range(job.layout.ranks))
    assert all(result["end"] == results[0]["end"] for result in results)
    assert results[0]["end"].tokens == straight.end.tokens
    assert results[0]["end"].loss == pytest.approx(straight.end.loss, rel=1e-5)
    assert_same_run(job.output, one.output)


@pytest.mark.parametrize(
    ("precision", "names"),
    [("bf16", ["interleaved", "zero-1"]), thorough("bf16", ["1f1b", "tensor"]), thorough("fp32", LAYOUTS)],
)
def test_other_layouts_hold_the_same_bits(
    group: Make, make: Callable[..., Job], precision: str, names: Iterable[str]
) -> None:
    """Saved by ZeRO-3 on two; loaded and written again by pipelines, and from there by one process."""
    fields = {"precision": precision, "steps": 1, "evaluation": {"max_rows": 1}}
    run_on(group, make("moving", {"data": 2, "zero": 3}, **fields))
    saved = checkpoint_files(checkpoints_of(make("moving").output)[-1])
    for name in names:
        job, copy = make("moving", LAYOUTS[name], **fields), make(f"copy-{name}").output
        group(job.layout.ranks).run(write_again, job.model_dump(mode="json"), str(copy))
        assert checkpoint_files(checkpoints_of(copy)[-1]) == saved, name


def test_a_pipeline_stopped_and_resumed_is_bit_equal(group: Make, make: Callable[..., Job]) -> None:
    whole, parts = (make(name, {"pipeline": 2}, steps=2) for name in ("whole", "parts"))
    run_on(group, whole)
    run_on(group, parts, stop_after=1)
    run_on(group, parts, resume=True)
    ours, theirs = (checkpoint_files(checkpoints_of(job.output)[-1]) for job in (parts, whole))
    assert ours == theirs


def test_a_pipeline_without_a_flush_goes_on_to_the_bit_whenever_it_ran_empty(
    group: Make, make: Callable[..., Job]
) -> None:
    """One run saves and evaluates at its end alone; the other stops, is resumed, and evaluates after every step."""
    quiet = {"steps": 5, "evaluation": {"max_rows": 2}}
    whole, parts = make("whole", UNFLUSHED, **quiet), make("parts", UNFLUSHED, **quiet)
    busy = make("parts", UNFLUSHED, steps=5, evaluation={"max_rows": 2, "every": 1})
    run_on(group, whole)
    run_on(group, parts, stop_after=2)
    run_on(group, busy, resume=True)
    ours, theirs = (checkpoint_files(checkpoints_of(job.output)[-1]) for job in (parts, whole))
    assert ours == theirs
    rows = [[row for row in read_metrics(job.output / METRICS_FILE) if "loss" in row] for job in (parts, whole)]
    assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]] == [1, 2, 3, 4, 5]
    for name in ("loss", "gradient_norm", "lr", "tokens"):
        assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]]


def test_other_schedules_go_on_from_a_pipeline_without_a_flush_and_back(group: Make, make: Callable[..., Job]) -> None:
    """Weights of one update before are in its checkpoints; a run without them begins with the newest."""
    fields = {"evaluation": {"max_rows": 1}, "saving": {"sharded": False}}
    run_on(group, make("moving", UNFLUSHED, steps=2, **fields))
    run_on(group, make("moving", {"pipeline": 2}, steps=3, **fields), resume=True)
    run_on(group, make("moving", UNFLUSHED, steps=4, **fields), resume=True)
    assert alone(make("moving", steps=5, **fields), resume=True).step == 5


def test_a_pipeline_samples_and_one_process_goes_on(group: Make, make: Callable[..., Job]) -> None:
    """The last stage has the logits; the first rank tells what comes of them."""
    asked = {"max_rows": 2, "prompts": ["the quick"], "sample_tokens": 3}
    found = group(2).run(sampled, make("moving", {"pipeline": 2}, evaluation=asked, steps=2).model_dump(mode="json"))
    one, other = (make("one", evaluation=asked, steps=2), make("moving", steps=3))
    assert found[0] == sampled(one.model_dump(mode="json"))
    assert found[0][0][0] == "the quick"
    assert_same_run(other.output, one.output, 2)
    assert alone(other, resume=True).step == 3


def sampled(fields: dict[str, Any]) -> list[tuple[str, str]]:
    return list(run_job(Job.model_validate(fields), quiet=True).samples)
