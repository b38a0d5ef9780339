"""Step times: against measured steps, against counts made another way, and by what must not happen."""

import csv
from typing import Any

import pytest

from benchmarks.reports.documentation import RESULTS
from tests.plan.questions import question
from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.memory.formulas.pipeline import layer_counts
from tightfit.models.presets import preset
from tightfit.plan.cost import Costs
from tightfit.plan.seconds.attention import attention_pairs
from tightfit.plan.seconds.parameters import model_params
from tightfit.plan.seconds.products import layer_linears
from tightfit.plan.steptime import StepTime

NONE = Levers()


def step(model: str, on: str, seq: int, rows: int, layout: Layout, levers: Levers = NONE) -> StepTime:
    asked = question(model, on, seq, rows)
    return Costs(asked.workload, asked.machine).step(layout, levers)


def measured_ms(file: str, column: str, **wanted: str) -> list[float]:
    with (RESULTS / file).open(encoding="utf-8", newline="") as opened:
        rows = list(csv.DictReader(opened))
    return [float(row[column]) for row in rows if all(row[name] == value for name, value in wanted.items())]


MEASURED_STEPS = [
    ("llama-3.2-1b", 8192, 2, 0, ("hf_step.csv", "step_ms_p50", {"case": "h200-1b"})),
    ("llama-3.1-8b", 8192, 1, 0, ("hf_step.csv", "step_ms_p50", {"case": "h200-8b"})),
    ("llama-3.1-8b", 32768, 1, 1, ("loss_memory.csv", "step_ms", {"loss": "fused loss"})),
]


@pytest.mark.parametrize(("model", "seq", "rows", "checkpoint_every", "where"), MEASURED_STEPS)
def test_measured_steps_of_one_gpu(
    model: str, seq: int, rows: int, checkpoint_every: int, where: tuple[str, str, dict[str, str]]
) -> None:
    """Pure bf16 on an H200, with our kernels; none of these rows is where a constant comes from."""
    asked = question(model, "H200", seq, rows, precision="pure-bf16")
    costs = Costs(asked.workload, asked.machine)
    predicted = costs.step(Layout(micro_batch=rows), Levers(checkpoint_every=checkpoint_every)).step_s * 1e3
    file, column, wanted = where
    mine = {"implementation": "tightfit"} if file == "hf_step.csv" else {}
    found = measured_ms(file, column, **wanted, **mine)
    assert found
    assert [ms for ms in found if predicted != pytest.approx(ms, rel=0.15)] == []


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt2", "mixtral-8x7b", "qwen3-4b", "gemma-2-2b", "tiny-qwen2-moe"])
def test_parameters_are_counted_as_the_spec_counts_them(model: str) -> None:
    spec = preset(model)
    counted = model_params(spec)
    everything = spec.layers * (counted.layer + counted.layer_experts) + counted.ends
    assert everything == pytest.approx(spec.params(), rel=1e-3)
    matrices = spec.layers * layer_linears(spec).weights
    active = spec.params(active=True) - spec.embedding_params - spec.head_params
    assert matrices == pytest.approx(active, rel=0.02)


def test_attention_looks_through_windows() -> None:
    full, windowed = preset("mistral-7b"), preset("mistral-7b-v0.1")
    assert attention_pairs(full, 1000) == 1000**2 / 2
    counted = sum(min(i + 1, 4096) for i in range(16384))
    assert attention_pairs(windowed, 16384) == pytest.approx(counted, rel=1e-3)


def test_parts_add_up_and_compute_is_six_operations_per_weight_and_token() -> None:
    found = step("llama-3.1-8b", "8xH100-80GB", 512, 64, Layout(data=8, zero=3, micro_batch=8))
    assert found.step_s == pytest.approx(sum(seconds for _, seconds in found.parts()))
    tokens = 8 * 512
    least = 6 * tokens * (8.03e9 - 0.53e9) / 989.4e12
    assert least < found.compute_s < 2.5 * least


def test_recompute_is_one_more_forward_but_for_the_last_product() -> None:
    layout = Layout(micro_batch=1)
    none, all_layers, half = (
        step("llama-3.1-8b", "H200", 8192, 1, layout, Levers(checkpoint_every=every)) for every in (0, 1, 2)
    )
    assert none.recompute_s == 0
    assert all_layers.recompute_s == pytest.approx(2 * half.recompute_s)
    assert 0.19 < all_layers.recompute_s / none.compute_s < 0.25
    whole = step("gemma-2-9b", "H200", 4096, 1, layout, Levers(checkpoint_every=1))  # whose outputs are normed
    assert 0.25 < whole.recompute_s / whole.compute_s < 1 / 3 + 0.02


def test_every_lever_costs_time_or_nothing() -> None:
    layout = Layout(data=8, zero=3, micro_batch=1)
    base = step("llama-3.1-8b", "8xA100-80GB", 4096, 64, layout)
    for levers in (
        Levers(checkpoint_every=1),
        Levers(tiles=8),
        Levers(offload="optimizer"),
        Levers(offload="weights"),
        Levers(checkpoint_every=1, offload_checkpoints=True),
        Levers(loss="plain"),
        Levers(loss_chunk_bytes=0),
    ):
        assert step("llama-3.1-8b", "8xA100-80GB", 4096, 64, layout, levers).step_s >= base.step_s


def test_zero_stages_send_what_the_table_of_data_parallelism_says() -> None:
    """Four micro-batches: reductions once under ZeRO-1, every time under 2; gathering twice every time under 3."""
    frames = {}
    for zero in (0, 1, 2, 3):
        asked = question("llama-3.1-8b", "8xV100-32GB", 16, 32, precision="fp16")
        frames[zero] = Costs(asked.workload, asked.machine).layout_cost(Layout(data=8, zero=zero, micro_batch=1))
    sync = frames[3].data
    assert sync.reduce_s == pytest.approx(2 * sync.gather_s, rel=0.05)  # float32 against 16 bits
    assert sync.all_reduce_s == pytest.approx(2 * sync.gather_s, rel=0.05)
    times = {zero: frame.step(Levers()).data_s for zero, frame in frames.items()}
    assert times[0] < times[1] < times[2] < times[3]


LINK = 55e9 * 47.39 / 55.32
"""Bytes a second each way of PCIe 5 beside an H100, as copies go both ways beside products."""


def offload_s(levers: Levers, rows: int = 1, length: int = 4096, precision: Any = "bf16") -> tuple[float, StepTime]:
    asked = question("llama-3.1-8b", "H100-80GB", length, rows, precision=precision)
    found = Costs(asked.workload, asked.machine).step(Layout(micro_batch=1), levers)
    return found.offload_s, found


def test_offloaded_states_pass_at_the_links_speed_behind_the_next_forward() -> None:
    exposed, found = offload_s(Levers(offload="optimizer"))
    link_s = 12 * 8.03e9 / LINK
    assert link_s - found.compute_s / 2 < exposed < link_s
    assert exposed == pytest.approx(link_s - found.compute_s / 3, rel=0.05)
    narrow, _ = offload_s(Levers(offload="optimizer", optimizer_states="8bit"))
    assert narrow == pytest.approx(exposed - 6 * 8.03e9 / LINK, rel=0.02)


def test_updates_inside_backward_hide_the_link_behind_it_too() -> None:
    """Rows of 8192 tokens, whose kernels are shorter than the ring of states is long."""
    after, plain = offload_s(Levers(offload="optimizer"), length=8192)
    everything = Levers(offload="optimizer", update_in_backward=True, offload_gradient_bytes=2**29)
    nothing_late, found = offload_s(everything, length=8192)
    link_s = 12 * 8.03e9 / LINK
    assert after == pytest.approx(link_s - plain.compute_s / 3, rel=0.05)
    assert nothing_late == pytest.approx(link_s - found.compute_s * 2 / 3, rel=0.05)


def test_long_kernels_hold_the_link_up() -> None:
    """Rows of 32 768: attention's backward alone runs for 40 ms, of which the ring hides three."""
    levers = Levers(offload="optimizer", update_in_backward=True, offload_gradient_bytes=2**29)
    inside, found = offload_s(levers, length=32_768)
    hidden_s = 12 * 8.03e9 / LINK - inside
    assert 0.25 * found.compute_s < hidden_s < 0.5 * found.compute_s  # of the two thirds that backward is


def test_what_stays_on_the_gpu_does_not_travel() -> None:
    whole, _ = offload_s(Levers(offload="optimizer"))
    half, _ = offload_s(Levers(offload="optimizer", offload_keep_bytes=int(6 * 8.03e9)))
    assert whole - half == pytest.approx(6 * 8.03e9 / LINK, rel=0.01)
    assert offload_s(Levers(offload="optimizer", offload_keep_bytes=10**12))[0] == 0.0


def test_weights_travel_with_every_micro_batch() -> None:
    levers = Levers(offload="weights", checkpoint_every=1)
    states, found = offload_s(Levers(offload="optimizer", checkpoint_every=1), 4)
    weights, _ = offload_s(levers, 4)
    fetched = 4 * 8.03e9 / LINK  # float32 masters
    forward = (found.compute_s + found.recompute_s) / 4 / 4
    assert weights - states > 3 * (fetched - forward)


def test_the_host_updates_at_its_own_speed() -> None:
    on_host, found = offload_s(Levers(offload="optimizer", offload_update="host"))
    assert on_host == pytest.approx(8.03e9 / 4.313e9 - found.compute_s / 3, rel=0.05)
    best, _ = offload_s(Levers(offload="optimizer", offload_update="auto"))
    assert best == min(on_host, offload_s(Levers(offload="optimizer"))[0])


def test_levels_of_keeping_cost_what_they_compute_again() -> None:
    """Between everything again and nothing again, in the order of what is kept; a budget buys time with bytes."""
    asked = question("llama-3.1-8b", "H200", 8192, 1)
    frame = Costs(asked.workload, asked.machine).layout_cost(Layout(micro_batch=1))
    kept = [Levers(checkpoint_every=1, checkpoint_keep=keep) for keep in ("nothing", "attention", "matmuls")]
    times = [frame.step(each).recompute_s for each in (*kept, Levers())]
    assert times[0] > times[1] > times[2] > times[3] == 0.0
    budgets = [frame.step(Levers(checkpoint_budget_bytes=gib * 2**30)).recompute_s for gib in (3, 8, 16, 200)]
    assert times[0] > budgets[0] > budgets[1] > budgets[2] > budgets[3] == 0.0
    every_other = frame.step(Levers(num_checkpoints=16)).recompute_s
    assert every_other == pytest.approx(times[0] / 2)


def test_fp8_makes_products_cheaper_where_the_card_has_it() -> None:
    for card, faster in (("H200", True), ("A100-80GB", False)):
        asked = question("llama-3.1-8b", card, 8192, 1)
        costs = Costs(asked.workload, asked.machine)
        layout = Layout(micro_batch=1)
        native, narrow = (costs.step(layout, each).compute_s for each in (Levers(), Levers(matmul="fp8-tensor")))
        assert (narrow < native) is faster
        assert narrow > native / 2


def test_tensor_ranks_pay_for_slow_links() -> None:
    layout = Layout(tensor=8, micro_batch=1)
    fast = step("llama-3.1-8b", "8xA100-80GB", 4096, 8, layout)
    slow = step("llama-3.1-8b", "8xA100-80GB:pcie", 4096, 8, layout)
    assert slow.tensor_s > 8 * fast.tensor_s
    assert 1 < slow.compute_s / fast.compute_s < (400 / 300) ** 0.5, "PCIe cards have 300 W, not 400"


@pytest.mark.parametrize("stages", [1, 7, 63, 64])
@pytest.mark.parametrize("split", [True, False])
def test_collectives_are_those_of_the_busiest_stage(stages: int, split: bool) -> None:
    """Both ways, counted stage by stage: four a layer (all-reduces) or eight, of the embedding and of the loss too."""
    asked = question("llama-3.1-405b", f"{stages}x2xH100-80GB", 8192, 64)
    layout = Layout(tensor=2, pipeline=stages, sequence_parallel=split, micro_batch=1)
    frame = Costs(asked.workload, asked.machine).layout_cost(layout)
    group = frame.ctx.group(1, 2)
    whole_bytes = 8192 * 16384 * 2
    each_s = group.all_gather_s(whole_bytes) if split else group.all_reduce_s(whole_bytes)
    calls = [(8 if split else 4) * layers for layers in layer_counts(asked.workload.spec, 8192, layout)]
    for end in (0, -1):
        calls[end] += 2 if split else 1
    assert 2 * frame.tensor.one_way_s == pytest.approx(max(calls) * each_s)


def test_experts_and_context_and_stages_have_their_own_lines() -> None:
    routed = step("mixtral-8x7b", "2x8xH100-80GB", 4096, 64, Layout(data=16, zero=1, expert=8, micro_batch=1))
    assert routed.expert_s > 0
    ring = step("llama-3.1-8b", "8xA100-80GB:pcie", 8192, 8, Layout(context=8, micro_batch=1))
    assert ring.context_s > 0
    staged = step("llama-3.1-8b", "8xA100-80GB", 4096, 64, Layout(pipeline=8, micro_batch=1))
    assert staged.bubble_s > 0
    assert staged.pipeline_s > 0
    interleaved = Layout(pipeline=8, micro_batch=1, schedule="interleaved", stages_per_rank=4)
    assert step("llama-3.1-8b", "8xA100-80GB", 4096, 64, interleaved).bubble_s < staged.bubble_s / 3


def test_a_card_without_the_number_format_is_a_sentence() -> None:
    asked = question("llama-3.2-1b", "V100-32GB", 512, 8, precision="bf16")
    with pytest.raises(UserError, match=r"V100-32GB has no bf16 units.*fp16"):
        Costs(asked.workload, asked.machine)
    assert question("llama-3.2-1b", "V100-32GB", 512, 8).workload.precision == "fp16"
