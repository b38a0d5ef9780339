"""Runs with states on the host of several ranks: stopped, resumed, and moved to and from layouts without offload."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.covering import thorough
from tests.distributed.group import Group
from tests.distributed.test_checkpoints import rewritten, run_on
from tests.train.jobs import tiny_job
from tightfit.jobs.job import Job
from tightfit.models.resolve import checkpoints_of

Make = Callable[[int], Group]
SMALL = {"source": "tiny-llama", "shape": {"layers": 2, "hidden_size": 32, "mlp_size": 48}}
OPTIMIZER = {"offload": "optimizer"}
WEIGHTS = {"offload": "weights", "checkpoint_every": 1}


@pytest.fixture
def make(tmp_path: Path, corpus: Path, token_cache: Path) -> Callable[..., Job]:
    def made(name: str, layout: dict[str, Any] | None = None, levers: dict[str, Any] | None = None, **more: Any) -> Job:
        fields: dict[str, Any] = {"layout": {"micro_batch": 1} | (layout or {}), "levers": levers or {}}
        fields |= {"optimizer": {"lr": 1e-3}, "model": SMALL, "steps": 2, "saving": {"every": 1}}
        fields |= {"evaluation": {"max_rows": 1}}
        return tiny_job(tmp_path / name, corpus, token_cache, **(fields | more))

    return made


@pytest.mark.parametrize(
    ("layout", "levers", "precision"),
    [({"data": 2, "zero": 3}, OPTIMIZER, "bf16"), thorough({"tensor": 2}, WEIGHTS, "fp32")],
)
def test_stopped_and_resumed_is_bit_equal(
    group: Make, make: Callable[..., Job], layout: dict[str, Any], levers: dict[str, Any], precision: str
) -> None:
    """In pieces, which several ranks write by default."""
    whole, parts = (make(name, layout, levers, precision=precision) for name in ("whole", "parts"))
    run_on(group, whole)
    run_on(group, parts, stop_after=1)
    found = checkpoints_of(parts.output)[-1]
    assert (found / "sharded").is_dir()
    assert not list(found.glob("*.safetensors"))
    run_on(group, parts, resume=True)
    ours, theirs = (rewritten(group, job, job.output.parent / f"copy {job.output.name}") for job in (parts, whole))
    assert ours == theirs


READERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"data": 4, "zero": 3}, {}),
    ({"data": 2, "zero": 1}, OPTIMIZER),
    ({"tensor": 2, "pipeline": 2}, WEIGHTS),
]
MORE_READERS: list[tuple[dict[str, Any], dict[str, Any]]] = [({"tensor": 2, "pipeline": 2}, {}), ({}, OPTIMIZER)]


@pytest.mark.parametrize("readers", [READERS, thorough(MORE_READERS)], ids=["ranks", "more"])
def test_states_move_between_hosts_and_gpus(
    group: Make, make: Callable[..., Job], readers: list[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    """Saved by offloading ZeRO-3 ranks; read to the same bits without offload, by one process, stages and tensor ranks,
    and by offloading ranks of other layouts."""
    fields = {"precision": "bf16", "steps": 1}
    run_on(group, make("run", {"data": 2, "zero": 3}, OPTIMIZER, **fields))
    expected = rewritten(group, make("run", **fields), make("by one").output)
    for number, (layout, levers) in enumerate(readers):
        job = make("run", layout, levers, **fields)
        assert rewritten(group, job, make(f"copy {number}").output) == expected, (layout, levers)
