"""Checkpoints in pieces: written while training goes on, and read by any layout to the same bits."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.covering import thorough
from tests.distributed.group import Group
from tests.distributed.test_runs import alone, run_fields, write_again
from tests.train.jobs import checkpoint_files, tiny_job
from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.models.loading import load_model
from tightfit.models.resolve import checkpoints_of
from tightfit.models.saving import export_model
from tightfit.train.metrics import METRICS_FILE, read_metrics

Make = Callable[[int], Group]
SMALL = {"source": "tiny-llama", "shape": {"layers": 2, "hidden_size": 32, "mlp_size": 48}}
LAYOUTS = {
    "one": {},
    "replicas": {"data": 2},
    "zero-3": {"data": 4, "zero": 3},
    "tensor and pipeline": {"tensor": 2, "pipeline": 2},
    "all": {"data": 2, "zero": 1, "tensor": 2, "pipeline": 2},
    "context": {"data": 2, "context": 2, "zero": 3},
    "context and tensor": {"context": 2, "ring": 2, "zero": 1, "tensor": 2},
}


@pytest.fixture
def make(tmp_path: Path, corpus: Path, token_cache: Path) -> Callable[..., Job]:
    def made(name: str, layout: dict[str, Any] | None = None, *, sharded: bool = True, **changes: Any) -> Job:
        fields = {"layout": {"micro_batch": 1} | (layout or {}), "evaluation": {"max_rows": 1}, "steps": 3}
        fields |= {"optimizer": {"lr": 1e-3}, "model": SMALL, "saving": {"every": 1, "keep": 3, "sharded": sharded}}
        return tiny_job(tmp_path / name, corpus, token_cache, **(fields | changes))

    return made


def run_on(group: Make, job: Job, **options: Any) -> None:
    if job.layout.ranks == 1:
        alone(job, **options)
    else:
        group(job.layout.ranks).run(run_fields, job.model_dump(mode="json"), options)


def rewritten(group: Make, job: Job, copy: Path) -> dict[str, bytes]:
    """The newest checkpoint of `job`'s run, loaded in its layout and written by the first rank in one piece."""
    arguments = job.model_dump(mode="json"), str(copy)
    group(job.layout.ranks).run(write_again, *arguments) if job.layout.ranks > 1 else write_again(*arguments)
    return checkpoint_files(checkpoints_of(copy)[-1])


@pytest.mark.parametrize(
    ("precision", "layouts"),
    [("bf16", ["one", "tensor and pipeline"]), thorough("fp32", ["one", "all"]), thorough("bf16", LAYOUTS)],
)
def test_pieces_of_zero_3_on_four_are_read_by_every_layout(
    group: Make, make: Callable[..., Job], precision: str, layouts: Iterable[str]
) -> None:
    """In bf16 there are masters beside all that fp32 has."""
    fields = {"precision": precision, "steps": 1}
    run_on(group, make("whole", LAYOUTS["zero-3"], sharded=False, **fields))
    run_on(group, make("pieces", LAYOUTS["zero-3"], **fields))
    found = checkpoints_of(make("pieces").output)[-1]
    assert len(list((found / "sharded").glob("*.distcp"))) == 4, "every rank writes"
    assert not list(found.glob("*.safetensors"))
    expected = rewritten(group, make("whole", **fields), make("copy of whole").output)
    for name in layouts:
        copy = make(f"copy by {name}").output
        assert rewritten(group, make("pieces", LAYOUTS[name], **fields), copy) == expected, name


ROUTED = {"source": "tiny-mixtral", "shape": {"layers": 2, "hidden_size": 32}}
EXPERTS = {
    "experts": {"data": 2, "expert": 2},
    "experts, zero 3": {"data": 4, "expert": 2, "zero": 3},
    "experts and tensor": {"data": 2, "expert": 2, "tensor": 2, "zero": 1},
    "one": {},
}


@pytest.mark.thorough
@pytest.mark.parametrize("readers", [["experts and tensor"], ["experts", "experts, zero 3"]])
def test_pieces_of_expert_ranks_are_read_by_every_layout(
    group: Make, make: Callable[..., Job], readers: list[str]
) -> None:
    """Weights, masters and moments; and what the run says about its experts."""
    fields = {"precision": "bf16", "steps": 1, "model": ROUTED}
    written = make("pieces", EXPERTS["experts, zero 3"], **fields)
    run_on(group, written)
    expected = rewritten(group, make("pieces", **fields), make("copy by one process").output)
    for name in readers:
        copy = make(f"copy by {name}").output
        assert rewritten(group, make("pieces", EXPERTS[name], **fields), copy) == expected, name
    row = read_metrics(written.output / METRICS_FILE)[-2]
    assert row["expert_load_max"] >= 1 >= row["expert_load_min"] >= 0


@pytest.mark.thorough
def test_a_run_goes_on_with_other_expert_ranks(group: Make, make: Callable[..., Job]) -> None:
    fields = {"model": ROUTED}
    run_on(group, make("moving", EXPERTS["experts and tensor"], **fields), stop_after=1)
    run_on(group, make("moving", EXPERTS["experts, zero 3"], **fields), resume=True, stop_after=2)
    run_on(group, make("moving", **fields), resume=True)
    run_on(group, make("one", sharded=False, **fields))
    ours, theirs = (load_model(str(make(name).output)).model.state_dict() for name in ("moving", "one"))
    for name, weight in theirs.items():
        assert (ours[name] - weight).norm() < 1e-3 * weight.norm(), name


@pytest.mark.parametrize("name", [thorough("replicas"), "tensor and pipeline"])
def test_what_is_written_beside_training_is_the_step_it_was_taken_at(
    group: Make, make: Callable[..., Job], name: str, tmp_path: Path
) -> None:
    """Training goes on at once and changes every weight while they are written."""
    job, truth = (make(kind, LAYOUTS[name], sharded=kind == "pieces", steps=2) for kind in ("pieces", "whole"))
    run_on(group, job)
    run_on(group, truth)
    steps = [path.name for path in checkpoints_of(job.output)]
    assert steps == ["step-00000001", "step-00000002"]
    for step in steps:
        exported = tmp_path / f"exported {step}"
        export_model(str(job.output / "checkpoints" / step), exported, form="hf", dtype="fp32")
        ours, theirs = (
            load_file(folder / "model.safetensors") for folder in (exported, truth.output / "checkpoints" / step)
        )
        assert ours.keys() == theirs.keys()
        assert all(ours[key].equal(theirs[key]) for key in theirs), step


def test_a_run_goes_on_from_pieces_in_another_layout(group: Make, make: Callable[..., Job]) -> None:
    run_on(group, make("moving", LAYOUTS["context"]), stop_after=1)
    run_on(group, make("moving", LAYOUTS["zero-3"]), resume=True, stop_after=2)
    run_on(group, make("moving", LAYOUTS["tensor and pipeline"]), resume=True)
    run_on(group, make("one", sharded=False))
    ours, theirs = (load_model(str(make(name).output)).model.state_dict() for name in ("moving", "one"))
    for name, weight in theirs.items():
        assert (ours[name] - weight).norm() < 1e-3 * weight.norm(), name


def test_damaged_pieces_get_a_sentence(group: Make, make: Callable[..., Job]) -> None:
    job = make("damaged", LAYOUTS["replicas"], steps=1)
    run_on(group, job)
    pieces = sorted((checkpoints_of(job.output)[-1] / "sharded").glob("*.distcp"))
    largest = max(pieces, key=lambda piece: piece.stat().st_size)  # copies write nothing
    content = largest.read_bytes()
    largest.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with pytest.raises(UserError, match=r"distcp is damaged: its bytes are not those that were written"):
        load_model(str(job.output))
    for piece in pieces:
        piece.write_bytes(piece.read_bytes()[:100])
    with pytest.raises(UserError, match=r"is damaged or of another model|must belong to the same model"):
        load_model(str(job.output))
