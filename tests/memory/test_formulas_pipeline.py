"""Memory of every pipeline stage: formulas against the real step of that stage on fake tensors."""

from dataclasses import replace
from typing import Any

import pytest

from tests.covering import covering, sampled, thorough
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.cut import balanced, cut, head_operations, layer_operations
from tightfit.memory.formulas.fsdp2 import installed
from tightfit.memory.formulas.overheads import Overheads
from tightfit.memory.formulas.training import training_ledger
from tightfit.models.presets import preset
from tightfit.prove.rehearsal import rehearse

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "1f1b": ({}, {}, 0.02),
    "1f1b-recomputed": ({}, {"checkpoint_every": 1}, 0.02),
    "gpipe": ({"schedule": "gpipe"}, {}, 0.02),
    "gpipe-recomputed": ({"schedule": "gpipe"}, {"checkpoint_every": 1}, 0.02),
    "zero-bubble": ({"schedule": "zero-bubble"}, {}, 0.05),
    "interleaved": ({"schedule": "interleaved", "stages_per_rank": 2}, {}, 0.02),
    "zb-v": ({"schedule": "zb-v", "stages_per_rank": 2}, {}, 0.02),
    "2bw": ({"schedule": "2bw"}, {}, 0.02),
    "2bw-recomputed": ({"schedule": "2bw"}, {"checkpoint_every": 1}, 0.02),
    "replicas": ({"data": 2}, {}, 0.02),
    "zero-1": ({"data": 2, "zero": 1}, {}, 0.05),
    "tensor": ({"tensor": 2}, {}, 0.05),
    "2d": ({"tensor": 4, "tensor_mesh": "2d", "micro_batch": 2}, {}, 0.02),
    "2d-2bw": ({"tensor": 4, "tensor_mesh": "2d", "micro_batch": 2, "schedule": "2bw"}, {}, 0.02),
    "3d-recomputed": ({"tensor": 8, "tensor_mesh": "3d", "micro_batch": 4}, {"checkpoint_every": 1}, 0.02),
}


@sampled(5)
@pytest.mark.parametrize("name", covering(CASES, costly=lambda case: case[0].get("tensor_mesh") == "2d"))
def test_a_stage_holds_what_its_simulation_does(name: str) -> None:
    fields, levers, most = CASES[name]
    layout, given = Layout.model_validate({"pipeline": 2, "micro_batch": 1, **fields}), Levers.model_validate(levers)
    spec = replace(preset("llama-3.1-8b"), layers=6)
    workload = Workload(
        spec=spec, sequence_length=1024, global_batch=4 * layout.micro_batch * layout.data, precision="bf16"
    )
    found = training_ledger(workload, layout, given, Overheads(context_bytes=0, slack_share=0, fsdp2=installed()))
    truth = rehearse(workload, layout, given)
    stages = {line.rank for line in truth.lines}
    assert stages == {0, 1}
    for stage in stages:
        ours, theirs = (max(ledger.allocated_bytes(p, stage) for p in STEP) for ledger in (found, truth))
        assert theirs > 2**30
        assert abs(ours / theirs - 1) < most, f"stage {stage}: {ours / 2**30:.2f} GiB, simulated {theirs / 2**30:.2f}"


def test_the_last_stage_awaits_a_tied_embeddings_gradients() -> None:
    """Without a flush between steps it has gone on when the first stage sends them."""
    layout, spec = Layout(pipeline=2, micro_batch=1, schedule="2bw"), replace(preset("llama-3.2-1b"), layers=4)
    workload = Workload(spec=spec, sequence_length=512, global_batch=4, precision="bf16")
    found = training_ledger(workload, layout, Levers(), Overheads(context_bytes=0, slack_share=0, fsdp2=installed()))
    truth = rehearse(workload, layout, Levers())
    for stage in (0, 1):
        ours, theirs = (max(ledger.allocated_bytes(p, stage) for p in STEP) for ledger in (found, truth))
        assert abs(ours / theirs - 1) < 0.01, f"stage {stage}: {ours / 2**30:.2f} GiB, simulated {theirs / 2**30:.2f}"


EARLY: dict[str, tuple[dict[str, Any], int, float]] = {
    "1f1b": ({}, 2, 0.01),
    "zero-bubble": ({"schedule": "zero-bubble"}, 2, 0.02),
    "interleaved": ({"schedule": "interleaved", "stages_per_rank": 2}, 2, 0.01),
    "fewer-than-stages": ({"pipeline": 4}, 2, 0.02),
    "interleaved-of-four": (
        {"pipeline": 4, "schedule": "interleaved", "stages_per_rank": 2, "micro_batch": 1},
        4,
        0.02,
    ),
    "zero-1": ({"data": 2, "zero": 1}, 2, 0.01),
    "gpipe-zero-1": ({"schedule": "gpipe", "data": 2, "zero": 1}, 2, 0.01),
}


@sampled(4)
@pytest.mark.parametrize("name", [thorough(name) if name in ("interleaved", "zero-1") else name for name in EARLY])
def test_nothing_is_summed_before_the_first_backward(name: str) -> None:
    """With no more micro-batches than stages, all are in flight before there is any gradient."""
    fields, micro_batches, most = EARLY[name]
    layout = Layout.model_validate({"pipeline": 2, "micro_batch": 4, **fields})
    spec = replace(preset("llama-3.1-8b"), layers=8)
    rows = layout.micro_batch * micro_batches * layout.data
    workload = Workload(spec=spec, sequence_length=2048, global_batch=rows, precision="bf16")
    found = training_ledger(workload, layout, Levers(), Overheads(context_bytes=0, slack_share=0, fsdp2=installed()))
    truth = rehearse(workload, layout, Levers())
    for stage in {line.rank for line in truth.lines}:
        ours, theirs = (max(ledger.allocated_bytes(p, stage) for p in STEP) for ledger in (found, truth))
        assert abs(ours / theirs - 1) < most, f"stage {stage}: {ours / 2**30:.2f} GiB, simulated {theirs / 2**30:.2f}"


@pytest.mark.parametrize(
    ("layers", "ranks", "stages", "micro_batches"), [(11, 4, 2, 8), thorough(9, 2, 3, 8), (8, 2, 2, 2)], ids=str
)
def test_inputs_on_the_host_are_those_of_the_stages_in_flight(
    layers: int, ranks: int, stages: int, micro_batches: int
) -> None:
    """Stages of a rank are not of one size, and the large one's turn may come when the small one's is over."""
    layout = Layout(pipeline=ranks, schedule="interleaved", stages_per_rank=stages, micro_batch=1)
    levers, spec = Levers(checkpoint_every=1, offload_checkpoints=True), replace(preset("tiny-llama"), layers=layers)
    workload = Workload(spec=spec, sequence_length=64, global_batch=micro_batches, precision="bf16")
    found, truth = training_ledger(workload, layout, levers), rehearse(workload, layout, levers)
    for rank in {line.rank for line in truth.lines}:
        ours, theirs = (ledger.allocated_bytes("backward", rank, place="host") for ledger in (found, truth))
        assert ours == theirs > 0, f"rank {rank}"


STEP: tuple[Any, ...] = ("forward", "loss", "backward", "optimizer")


def test_stages_are_cut_by_what_they_cost() -> None:
    """Llama-3.2-1B's output projection costs as much as several of its layers, so the last stage has few."""
    spec = preset("llama-3.2-1b")
    spans = cut(spec, 4096, 4)
    assert [first for first, _ in spans[1:]] == [last for _, last in spans[:-1]]
    assert (spans[0][0], spans[-1][1]) == (0, spec.layers)
    layer = layer_operations(spec, 0, 4096)
    costs = [(last - first) * layer for first, last in spans]
    costs[-1] += head_operations(spec)
    even = spec.layers / 4 * layer + head_operations(spec)
    assert max(costs) < 0.8 * even


def test_the_cut_is_the_best_of_all() -> None:
    """Against every way of cutting nine layers of uneven costs into four."""
    from itertools import combinations

    layers, before, after = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0], 2.5, 7.0

    def largest(spans: tuple[tuple[int, int], ...]) -> float:
        costs = [sum(layers[first:last]) for first, last in spans]
        costs[0], costs[-1] = costs[0] + before, costs[-1] + after
        return max(costs)

    everything = (tuple(zip((0, *ends), (*ends, 9), strict=True)) for ends in combinations(range(1, 9), 3))
    assert largest(balanced(layers, before, after, 4)) == min(map(largest, everything))
