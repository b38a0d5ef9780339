"""Launches, tiles, fp8, updates and copies: each part of a step's time against a count made another way."""

from itertools import pairwise
from typing import Any

import pytest

from tests.plan.questions import question
from tightfit.hardware.efficiency import MEASURED
from tightfit.hardware.launches import (
    GAP_SHARE,
    LAYER,
    MATRIX_UPDATE_MS,
    PIECE_LAUNCH_MS,
    REPLAY_MS,
    REST,
    SLOW_HOST,
    STEP_IDLE_MS,
    UPDATE_MS,
    UPDATE_REST_MS,
)
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.levers.policy.offload import IN_FLIGHT_BYTES
from tightfit.models.resolve import resolve_spec
from tightfit.plan.answer import answer
from tightfit.plan.cost import Costs, LayoutCost
from tightfit.plan.seconds.launches import late_update_launch_s
from tightfit.plan.seconds.long_kernels import LongKernels
from tightfit.plan.seconds.passes import PassSeconds
from tightfit.plan.steptime import StepTime

ONE = Layout(micro_batch=1)
ONE_BY_ONE = Levers(cuda_graph="never")
CHECKPOINTED = Levers(checkpoint_every=1)
SHORT = LongKernels(layers=1, forward_s=[], backward_s=[])
"""Kernels that nothing waits for."""


def frame(model: str, length: int, rows: int = 1, on: str = "H200", layout: Layout = ONE) -> LayoutCost:
    asked = question(model, on, length, rows, precision="bf16")
    return Costs(asked.workload, asked.machine).layout_cost(layout)


def launched_s(found: StepTime) -> float:
    return found.compute_s + found.recompute_s + found.launch_s


def test_a_short_step_takes_what_the_host_needs() -> None:
    """30 layers of 512 tokens: the card computes for a tenth of that."""
    found = frame("smollm2-135m", 512).step(ONE_BY_ONE)
    assert found.compute_s < 0.02
    update_ms = UPDATE_REST_MS + 30 * UPDATE_MS[""]
    assert found.step_s == pytest.approx(1e-3 * (sum(REST) + 30 * sum(LAYER[""]) + update_ms))
    assert found.optimizer_s < 0.002, "the card's own, beside which the host launches the next step"
    again = frame("smollm2-135m", 512).step(Levers(checkpoint_every=1, cuda_graph="never"))
    assert again.step_s == pytest.approx(1e-3 * (sum(REST) + 30 * sum(LAYER["checkpoint_every=1"]) + update_ms))


def test_an_update_that_has_to_see_the_loss_is_launched_after_the_wait() -> None:
    found = frame("smollm2-135m", 512).step(Levers(optimizer_states="8bit", cuda_graph="never"))
    assert launched_s(found) == pytest.approx(1e-3 * (sum(REST) + 30 * sum(LAYER[""])))
    assert found.optimizer_s == pytest.approx(1e-3 * (UPDATE_REST_MS + 30 * UPDATE_MS["optimizer_states=8bit"]))


def test_a_long_step_does_not_wait_for_the_host() -> None:
    launched = {"": Levers(), "checkpoint_every=1": CHECKPOINTED}
    for name, levers in launched.items():
        gaps_s = GAP_SHARE * 1e-3 * (sum(REST) + 32 * sum(LAYER[name]))
        assert frame("llama-3.1-8b", 65536).step(levers).launch_s == pytest.approx(gaps_s)
    waiting = frame("llama-3.1-8b", 65536).step(Levers(optimizer_states="8bit"))
    assert waiting.launch_s == pytest.approx(1e-3 * STEP_IDLE_MS)


def test_a_slower_host_is_a_longer_step_where_it_bounds() -> None:
    asked = question("smollm2-135m", "H200", 512, 8)
    plain_ms = sum(LAYER[""]) + UPDATE_MS[""]
    usual, same, slow = (
        Costs(asked.workload, asked.machine, layer_launch_ms=ms).step(Layout(micro_batch=8), ONE_BY_ONE)
        for ms in (None, plain_ms, 2 * plain_ms)
    )
    assert usual == same
    assert slow.step_s == pytest.approx(2 * usual.step_s)
    assert slow.optimizer_s == usual.optimizer_s
    asked = question("llama-3.1-8b", "H200", 8192, 1)
    fast, slow = (
        Costs(asked.workload, asked.machine, layer_launch_ms=ms).step(ONE, Levers()) for ms in (plain_ms, 2 * plain_ms)
    )
    assert slow.step_s == fast.step_s


def test_a_step_that_a_slow_host_would_hold_up_is_a_graph() -> None:
    cost = frame("smollm2-135m", 512)
    assert cost.is_captured(Levers())
    found, launches_ms = cost.step(Levers()), sum(REST) + 30 * sum(LAYER[""])
    card_s = found.compute_s + found.optimizer_s + GAP_SHARE * 1e-3 * launches_ms
    host_s = 1e-3 * (REPLAY_MS + UPDATE_REST_MS + 30 * UPDATE_MS[""])
    assert found.step_s == pytest.approx(max(card_s, host_s))
    assert found.step_s < 0.2 * cost.step(ONE_BY_ONE).step_s
    why_not: Any
    for why_not in ({"cuda_graph": "never"}, {"offload": "optimizer"}):
        assert not cost.is_captured(Levers(**why_not))
    long = frame("llama-3.1-8b", 65536)
    assert not long.is_captured(Levers()), "which gains nothing"
    assert long.is_captured(Levers(cuda_graph="always"))
    asked = question("smollm2-135m", "2xH200", 512, 8)
    assert not Costs(asked.workload, asked.machine).layout_cost(Layout(micro_batch=4, data=2)).is_captured(Levers())


def test_a_graph_of_a_whole_step_leaves_the_host_its_batch() -> None:
    """Updates inside backward are in it; while the host prepares the next one, the card has nothing to do."""
    cost, inside = frame("smollm2-135m", 512), Levers(update_in_backward=True)
    assert cost.is_captured(inside)
    found = cost.step(inside)
    launches_ms = sum(REST) + 30 * (sum(LAYER[""]) + 7 * MATRIX_UPDATE_MS)
    idle_s = 1e-3 * (GAP_SHARE * launches_ms + REPLAY_MS)
    assert found.step_s == pytest.approx(found.compute_s + found.optimizer_s + idle_s)
    one_by_one = cost.step(Levers(update_in_backward=True, cuda_graph="never"))
    assert found.step_s < 0.2 * one_by_one.step_s
    for why_not in ({"rounding": "stochastic"}, {"optimizer_states": "factored"}):
        assert not cost.is_captured(inside.model_copy(update=why_not)), "which the host passes to every update"


def test_what_is_captured_depends_on_the_card_and_not_on_the_host_of_today() -> None:
    """A card that takes half as long as the measured host's launches, and one that takes three times as long."""
    fast, slow = (question("smollm2-135m", card, 2048, 8) for card in ("H200", "T4"))
    for asked, expected in ((fast, True), (slow, False)):
        found = {
            Costs(asked.workload, asked.machine, layer_launch_ms=ms)
            .layout_cost(Layout(micro_batch=8))
            .is_captured(Levers())
            for ms in (0.5, 3.0, 20.0)
        }
        assert found == {expected}
    cost = Costs(slow.workload, slow.machine).layout_cost(Layout(micro_batch=8))
    assert cost.step(Levers()).compute_s > SLOW_HOST * 1e-3 * (sum(REST) + 30 * sum(LAYER[""]))


def test_the_host_queues_every_piece_of_states() -> None:
    """Of a 1B model's layer: four projections in a piece each, three matrices of the MLP in four; none of the ends."""
    cost = frame("llama-3.2-1b", 8192)
    pieces_s = 16 * (4 + 3 * 4) * 1e-3 * PIECE_LAUNCH_MS
    asked: tuple[dict[str, Any], ...] = ({"update_in_backward": True}, {}, {"offload_update": "host"})
    inside, after, on_host = (cost.offload(Levers(offload="optimizer", **more)).queued for more in asked)
    deferred = (2**30 - IN_FLIGHT_BYTES) / 4 / (16 * 60_821_504)
    assert list(inside) == pytest.approx([deferred * pieces_s, (1 - deferred) * pieces_s], rel=0.001)
    assert list(after) == pytest.approx([pieces_s, 0.0], rel=0.001)
    assert on_host == (0.0, 0.0)


def test_pieces_that_the_host_queues_slowly_are_a_longer_step() -> None:
    """Many small matrices: the host needs longer for the 24 layers of Qwen2.5-0.5B than the link for their states."""
    levers = Levers(offload="optimizer", update_in_backward=True, offload_gradient_bytes=IN_FLIGHT_BYTES)
    cost = frame("qwen2.5-0.5b", 512)
    found, passing = cost.step(levers), cost.offload(levers).states
    pieces_s = cost.offload(levers).queued.backward_s
    without = cost.offload(levers).step_s(checkpoint_bytes=0.0, passes=PassSeconds(), kernels=SHORT)
    assert without == pytest.approx(max(passing.backward_s, pieces_s) + passing.after_s)
    updates_s = found.optimizer_s - late_update_launch_s(resolve_spec("qwen2.5-0.5b"), layers=24)
    forward_wait_s = host_forward_s(cost) - cost.passes.forward_s
    host_backward_s = found.launch_s - forward_wait_s + cost.passes.backward_s + updates_s
    assert host_backward_s + pieces_s > passing.backward_s
    assert found.offload_s == pytest.approx(pieces_s + updates_s + passing.after_s, rel=0.01)


def test_deferred_states_pass_beside_the_next_forward_pass() -> None:
    """Of Llama 8B's last layers as much as half a GiB of float32; its head is waited for before any other is sent."""
    levers = Levers(offload="optimizer", update_in_backward=True)
    cost = frame("llama-3.1-8b", 8192)
    states = cost.offload(levers).states
    vocabulary, layers, deferred = 128_256 * 4096, 32 * 218_112_000, 2**29 / 4
    each_s = states.after_s / vocabulary
    assert states.forward_s == pytest.approx(deferred * each_s, rel=1e-3)
    assert states.backward_s == pytest.approx((vocabulary + layers - deferred) * each_s, rel=1e-3)
    assert states.head_s == pytest.approx(vocabulary * each_s, rel=1e-3)
    share = states.deferred_share
    assert share == pytest.approx(deferred / layers, rel=1e-3)

    def exposed_s(forward_s: float, backward_s: float) -> float:
        passes = PassSeconds(forward_s, backward_s)
        return cost.offload(levers).step_s(checkpoint_bytes=0.0, passes=passes, kernels=SHORT)

    queued = cost.offload(levers).queued
    assert queued.forward_s < states.forward_s
    assert queued.backward_s < states.backward_s
    at_once_s = states.forward_s + states.backward_s + states.after_s
    assert exposed_s(0.0, 0.0) == pytest.approx(at_once_s)
    assert exposed_s(0.5 * states.forward_s, 0.0) == pytest.approx(at_once_s - 0.5 * states.forward_s)
    assert exposed_s(10.0, 1.0) == pytest.approx(states.backward_s - (1 - share) * 1.0 + states.after_s)
    long_s = 2.0 * states.backward_s
    assert exposed_s(10.0, long_s) == pytest.approx(states.head_s - share * long_s + states.after_s)


def host_forward_s(cost: LayoutCost) -> float:
    return 1e-3 * (REST.forward_ms + cost.layers * LAYER["offload=optimizer"].forward_ms)


def test_each_tile_launches_as_much_as_the_one_before() -> None:
    times = [
        launched_s(frame("smollm2-135m", 512).step(Levers(tiles=tiles, cuda_graph="never"))) for tiles in (2, 4, 6, 8)
    ]
    steps = [after - before for before, after in pairwise(times)]
    assert steps == pytest.approx([steps[0]] * 3)
    measured = sum(LAYER["tiles=8"]) - sum(LAYER["tiles=2"])
    assert times[-1] - times[0] == pytest.approx(30e-3 * measured)


def test_tiles_compute_both_halves_again_but_for_the_last_product() -> None:
    long = frame("llama-3.1-8b", 65536)
    more = long.step(Levers(tiles=2)).compute_s - long.step(Levers()).compute_s
    products = long.layer.products
    least = 32 * (products.qkv_s + products.output_s + products.up_s)
    assert least < more < 32 * (products.forward_s + long.layer.elementwise.passes.forward_s)
    both = long.step(Levers(tiles=2, checkpoint_every=1)).recompute_s
    attention = 32 * long.layer.attention.forward_s
    assert attention < both < long.step(CHECKPOINTED).recompute_s


def test_fp8_saves_less_than_its_products_do() -> None:
    """A scale per tensor has three products of three in 8 bits, one per row two; both pay for codes."""
    long = frame("llama-3.1-8b", 8192)
    native, tensor, row = (
        long.step(levers).compute_s for levers in (Levers(), Levers(matmul="fp8-tensor"), Levers(matmul="fp8-row"))
    )
    products = 32 * 3 * long.layer.products.forward_s
    assert 0.2 * products < native - tensor < products / 2
    assert native > row > tensor


def test_updates_take_what_their_bytes_do() -> None:
    """Of 8B: 42 bytes a weight beside masters, its norm, widening and narrowing among them; without masters 16."""
    found = frame("llama-3.1-8b", 8192)
    bytes_s = 4.8e12 * MEASURED.bandwidth
    assert found.step(Levers()).optimizer_s == pytest.approx(42 * 8.03e9 / bytes_s / 0.9, rel=0.01)
    assert found.step(Levers(optimizer_states="bf16")).optimizer_s == pytest.approx(22 * 8.03e9 / bytes_s, rel=0.01)


def test_factored_updates_are_as_slow_as_their_launches() -> None:
    times = [
        frame("llama-3.2-1b", 8192).step(Levers(optimizer_states=form)).optimizer_s for form in ("bf16", "factored")
    ]
    assert times[1] > 3 * times[0]


def test_expert_ranks_update_their_own_experts() -> None:
    """Both of two ranks hold half of them, and each takes some half of the launches; the other weights are few."""
    layouts = [Layout(data=2, micro_batch=1), Layout(data=2, expert=2, micro_batch=1)]
    each, half = (
        frame("mixtral-8x7b", 4096, 2, "2xH200", layout).step(Levers(optimizer_states="factored")).optimizer_s
        for layout in layouts
    )
    assert 0.5 < half / each < 0.54


def test_pipelines_without_zero_hide_no_gradients() -> None:
    staged = frame("llama-3.1-8b", 4096, 32, "8xA100-80GB", Layout(pipeline=2, data=4, micro_batch=1))
    assert staged.step(Levers()).data_s == staged.data.all_reduce_s
    whole = frame("llama-3.1-8b", 4096, 32, "8xA100-80GB", Layout(data=8, micro_batch=1))
    assert whole.step(Levers()).data_s < 0.3 * whole.data.all_reduce_s


def test_fsdp_copies_are_not_hidden() -> None:
    """Weights read and written for each gathering, but the root's once; gradients read narrow and written wide."""
    sharded = frame("llama-3.1-8b", 16384, 8, "8xH100-80GB", Layout(data=8, zero=3, micro_batch=1))
    bytes_s = 3.35e12 * MEASURED.bandwidth
    assert sharded.data.unpack_s == pytest.approx(4 * 8.03e9 / bytes_s, rel=0.01)
    assert sharded.data.pack_s == pytest.approx(6 * 8.03e9 / bytes_s, rel=0.01)
    assert sharded.step(Levers()).data_s > 1.8 * sharded.data.unpack_s + sharded.data.pack_s


def test_a_plan_says_when_one_gpu_alone_is_faster() -> None:
    told = "one GPU alone would take"
    assert any(told in note for note in answer(question("smollm2-135m", "4xH200", 512, 8)).notes)
    assert not any(told in note for note in answer(question("llama-3.1-8b", "4xH200", 4096, 64)).notes)
