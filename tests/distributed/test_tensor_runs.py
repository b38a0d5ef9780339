"""Whole runs with tensor ranks: they end as one process does, and other layouts go on from their checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.covering import thorough
from tests.distributed.group import Group
from tests.distributed.test_runs import assert_same_run, run_fields, write_again
from tests.train.jobs import checkpoint_files, tiny_job
from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.models.resolve import checkpoints_of
from tightfit.train.loop import run_job

Make = Callable[[int], Group]
SMALL = {"source": "tiny-llama", "shape": {"layers": 2, "hidden_size": 32, "mlp_size": 48}}
TWO = {"tensor": 2}
GRID = {"tensor": 2, "data": 2, "zero": 3}


@pytest.fixture
def make(tmp_path: Path, corpus: Path, token_cache: Path) -> Callable[..., Job]:
    def made(name: str, layout: dict[str, int] | None = None, **changes: Any) -> Job:
        fields: dict[str, Any] = {
            "layout": {"micro_batch": 1, **(layout or {})},
            "evaluation": {"max_rows": 5, "every": 2},
            "steps": 4,
            "optimizer": {"lr": 1e-3},
            "model": SMALL,
        }
        return tiny_job(tmp_path / name, corpus, token_cache, **(fields | changes))

    return made


def run_on(group: Make, job: Job, **options: Any) -> list[dict[str, Any]]:
    if job.layout.ranks == 1:
        run_job(job, quiet=True, **options)
        return []
    return group(job.layout.ranks).run(run_fields, job.model_dump(mode="json"), options)


@pytest.mark.parametrize("layout", [thorough(TWO), GRID], ids=["tensor", "tensor-and-shards"])
def test_a_run_ends_as_one_process_s(group: Make, make: Callable[..., Job], layout: dict[str, int]) -> None:
    job, one = make("many", layout), make("one")
    results = run_on(group, job)
    run_on(group, one)
    assert [result["rank"] for result in results] == list(range(job.layout.ranks))
    assert all(result["end"] == results[0]["end"] for result in results)
    assert_same_run(job.output, one.output)


SHARDS, REPLICAS = {"data": 4, "zero": 3, "shard_inside": 2}, {"tensor": 2, "data": 2}


@pytest.mark.parametrize(
    ("precision", "layouts"),
    [("bf16", [SHARDS, REPLICAS]), thorough("bf16", [{}, TWO]), thorough("fp32", [{}, SHARDS])],
)
def test_other_layouts_hold_the_same_bits(
    group: Make, make: Callable[..., Job], precision: str, layouts: list[dict[str, int]]
) -> None:
    """Saved by two tensor ranks on two data ranks; loaded and written again by others, to the same files."""
    fields = {"precision": precision, "steps": 1, "evaluation": {"max_rows": 1}}
    run_on(group, make("moving", GRID, **fields))
    saved = checkpoint_files(checkpoints_of(make("moving").output)[-1])
    for number, layout in enumerate(layouts):
        job, copy = make("moving", layout, **fields), make(f"copy-{number}").output
        arguments = job.model_dump(mode="json"), str(copy)
        if job.layout.ranks > 1:
            group(job.layout.ranks).run(write_again, *arguments)
        else:
            write_again(*arguments)
        assert checkpoint_files(checkpoints_of(copy)[-1]) == saved, layout


def test_training_goes_on_in_another_layout(group: Make, make: Callable[..., Job]) -> None:
    """Two steps on tensor ranks, two more under ZeRO-3: four steps of one process."""
    run_on(group, make("moving", TWO), stop_after=2)
    job = make("moving", {"data": 2, "zero": 3})
    run_on(group, job, resume=True)
    run_on(group, make("one"))
    assert_same_run(job.output, make("one").output)


def test_heads_that_do_not_divide_are_refused(make: Callable[..., Job]) -> None:
    job = make("never", {"tensor": 3})
    with pytest.raises(UserError, match=r"has 3 rank\(s\), but 1 process\(es\) run"):
        run_job(job, quiet=True)
