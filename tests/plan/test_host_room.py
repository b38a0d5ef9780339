"""Runs that would fill the host are refused before they start, in a sentence that names the lever."""

import pytest

from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.training import host_parts
from tightfit.models.presets import preset
from tightfit.plan.host_room import refuse_host_shortage, usable_host_bytes

GIB = 2**30
WORKLOAD = Workload(spec=preset("llama-3.2-1b"), sequence_length=8192, global_batch=1)
ONE = Layout(micro_batch=1)


def sentence(levers: Levers, room_bytes: int, ranks_here: int = 1) -> str:
    with pytest.raises(UserError) as caught:
        refuse_host_shortage(WORKLOAD, ONE, levers, ranks_here, room_bytes)
    return str(caught.value)


def test_states_are_counted_weight_by_weight() -> None:
    states, checkpoints = host_parts(WORKLOAD, ONE, Levers(offload="optimizer"))
    params = WORKLOAD.spec.params()
    assert 12 * params <= states <= 14 * params
    assert checkpoints == 0


def test_checkpoints_are_the_residual_streams() -> None:
    levers = Levers(checkpoint_every=1, offload_checkpoints=True)
    states, checkpoints = host_parts(WORKLOAD, ONE, levers)
    stream = 2 * 8192 * WORKLOAD.spec.hidden_size
    assert states == 0
    assert (WORKLOAD.spec.layers - 2) * stream <= checkpoints <= WORKLOAD.spec.layers * stream


def test_a_host_that_is_short_is_named_with_the_lever_to_change() -> None:
    assert sentence(Levers(offload="optimizer"), 10 * GIB).startswith("this run would keep 1")
    assert "10.0 GiB are free; set levers.optimizer_states to bf16" in sentence(Levers(offload="optimizer"), 10 * GIB)
    narrow = Levers(offload="optimizer", optimizer_states="8bit")
    missing = sum(host_parts(WORKLOAD, ONE, narrow)) - GIB
    assert f"levers.offload_keep_bytes={missing}" in sentence(narrow, GIB)
    both = Levers(offload="optimizer", checkpoint_every=1, offload_checkpoints=True)
    states, checkpoints = host_parts(WORKLOAD, ONE, both)
    room = states + checkpoints // 2
    assert f"set levers.checkpoint_host_bytes to {room - states} or less" in sentence(both, room)


def test_ranks_of_a_node_share_it() -> None:
    levers = Levers(offload="optimizer")
    need = sum(host_parts(WORKLOAD, ONE, levers))
    refuse_host_shortage(WORKLOAD, ONE, levers, 1, need)
    said = sentence(levers, need, ranks_here=2)
    assert f"the 2 ranks of this node would keep {2 * need / 2**30:.1f} GiB" in said


def test_what_is_not_there_is_not_refused() -> None:
    refuse_host_shortage(WORKLOAD, ONE, Levers(), 1, 0)
    usable = usable_host_bytes()
    assert usable is None or usable >= 0
