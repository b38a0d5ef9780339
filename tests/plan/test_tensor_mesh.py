"""The planner offers meshes of tensor ranks: less traffic where ranks are many, more where they are few."""

import pytest

from tightfit.hardware.machine import parse_machine
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.training import peaks
from tightfit.models.presets import preset
from tightfit.plan.cost import Costs
from tightfit.plan.describe import describe_layout
from tightfit.plan.search.pins import Pins
from tightfit.plan.search.space import SearchSpace

WORKLOAD = Workload(spec=preset("llama-3.1-70b"), sequence_length=4096, global_batch=64)
FOUR, SIXTY_FOUR = parse_machine("4xH100-80GB"), parse_machine("8x8xH100-80GB")
LINE = Layout(tensor=64, micro_batch=64)
SQUARE = LINE.model_copy(update={"tensor_mesh": "2d"})
CUBE = LINE.model_copy(update={"tensor_mesh": "3d"})
DEEP = LINE.model_copy(update={"tensor_mesh": "2.5d", "tensor_depth": 4})


def test_every_shape_of_a_mesh_is_offered() -> None:
    space = SearchSpace(WORKLOAD, SIXTY_FOUR, Pins(layout={"tensor": 64, "data": 1, "micro_batch": 64}))
    meshes = {(layout.tensor_mesh, layout.tensor_axes) for layout in space.layouts() if layout.tensor_mesh != "1d"}
    assert meshes == {("2d", (1, 8, 8)), ("2.5d", (4, 4, 4)), ("3d", (4, 4, 4))}


@pytest.mark.parametrize("mesh", [SQUARE, CUBE, DEEP], ids=["2d", "3d", "2.5d"])
def test_many_ranks_wait_less_on_a_mesh(mesh: Layout) -> None:
    costs = Costs(WORKLOAD, SIXTY_FOUR)
    assert costs.step(mesh, Levers()).tensor_s < costs.step(LINE, Levers()).tensor_s


def test_few_ranks_wait_longer_on_a_mesh() -> None:
    costs, line = Costs(WORKLOAD, FOUR), Layout(tensor=4, micro_batch=64)
    square = line.model_copy(update={"tensor_mesh": "2d"})
    assert costs.step(square, Levers()).tensor_s > costs.step(line, Levers()).tensor_s


def test_a_stage_sends_its_blocks_and_waits_for_its_layers() -> None:
    """Half of the layers wait for half of a micro-batch's messages, and what is sent on is the same on any mesh."""
    costs = Costs(WORKLOAD, parse_machine("16x8xH100-80GB"))
    alone, staged = (costs.layout_cost(layout) for layout in (SQUARE, SQUARE.model_copy(update={"pipeline": 2})))
    assert staged.tensor.one_way_s == pytest.approx(alone.tensor.one_way_s / 2, rel=0.05)
    assert staged.stream_bytes == 64 * 4096 * WORKLOAD.spec.hidden_size * 2 / 64
    line = costs.layout_cost(LINE.model_copy(update={"pipeline": 2}))
    assert staged.send_s == line.send_s > 0
    deep = costs.layout_cost(DEEP.model_copy(update={"pipeline": 2})).tensor.once_s
    assert deep == pytest.approx(costs.layout_cost(DEEP).tensor.once_s / 2, rel=0.05)


@pytest.mark.parametrize("mesh", [SQUARE, CUBE, DEEP], ids=["2d", "3d", "2.5d"])
def test_a_mesh_splits_the_residual_stream_with_or_without_sequence_parallelism(mesh: Layout) -> None:
    costs, without = Costs(WORKLOAD, SIXTY_FOUR), mesh.model_copy(update={"sequence_parallel": False})
    assert costs.step(mesh, Levers()) == costs.step(without, Levers())


def test_larger_than_a_node_meshes_are_tried_beside_other_splits() -> None:
    """Inside a node by a pin alone."""
    machine, mesh_ranks = parse_machine("16x8xH100-80GB"), dict[str, set[int]]()
    for asked in ({"pipeline": 2}, {"context": 4}, {"pipeline": 32, "tensor_mesh": "2d"}):
        pins = Pins(layout={"micro_batch": 64, "data": 1, "zero": 0} | asked)
        for layout in SearchSpace(WORKLOAD, machine, pins).layouts():
            mesh_ranks.setdefault(str(asked), set()).add(layout.tensor if layout.tensor_mesh != "1d" else 0)
    tried = list(mesh_ranks.values())
    assert all(min(each - {0}) > 8 for each in tried[:2])
    assert tried[2] == {4}


def test_copies_of_weights_cost_memory() -> None:
    """A 2.5d mesh of depth 4 has a sixteenth of the weights on a rank; the others a sixty-fourth."""
    levers = Levers(checkpoint_every=1)
    held = {layout.tensor_mesh: peaks(WORKLOAD, layout, levers).gpu_bytes for layout in (SQUARE, CUBE, DEEP)}
    more = 16 * WORKLOAD.spec.params() * (1 / 16 - 1 / 64)
    assert held["2.5d"] - held["3d"] == pytest.approx(more, rel=0.1)
    assert held["2d"] == pytest.approx(held["3d"], rel=0.1)


def test_a_mesh_in_words() -> None:
    assert describe_layout(CUBE) == "tensor 64 on a 3d mesh (4 × 4 × 4), micro-batch 64"
    assert describe_layout(SQUARE) == "tensor 64 on a 2d mesh (8 × 8), micro-batch 64"
    assert describe_layout(LINE) == "tensor 64, micro-batch 64"
