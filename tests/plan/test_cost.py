"""Step times: against measured steps, against counts made another way, and by what must not happen."""

import csv

import pytest

from tests.plan.questions import question
from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.models.presets import preset
from tightfit.plan.cost import Costs
from tightfit.plan.steptime import StepTime
from tightfit.plan.work import attention_pairs, layer_work, sharded_params
from tightfit.report.documentation import RESULTS

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
    dense, experts, ends = sharded_params(spec)
    assert spec.layers * (dense + experts) + ends == pytest.approx(spec.params(), rel=1e-3)
    matrices = spec.layers * layer_work(spec).matmul_params
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


def test_recompute_is_one_more_forward() -> None:
    layout = Layout(micro_batch=1)
    none, all_layers, half = (
        step("llama-3.1-8b", "H200", 8192, 1, layout, Levers(checkpoint_every=every)) for every in (0, 1, 2)
    )
    assert none.recompute_s == 0
    assert all_layers.recompute_s == pytest.approx(2 * half.recompute_s)
    assert 0.25 < all_layers.recompute_s / none.compute_s < 1 / 3 + 0.02


def test_every_lever_costs_time_or_nothing() -> None:
    layout = Layout(data=8, zero=3, micro_batch=1)
    base = step("llama-3.1-8b", "8xA100-80GB", 4096, 64, layout)
    for levers in (
        Levers(checkpoint_every=1), Levers(tiles=8), Levers(offload="optimizer"), Levers(offload="weights"),
        Levers(checkpoint_every=1, offload_checkpoints=True), Levers(loss="plain"), Levers(loss_chunk_bytes=0),
    ):  # fmt: skip
        assert step("llama-3.1-8b", "8xA100-80GB", 4096, 64, layout, levers).step_s >= base.step_s


def test_zero_stages_send_what_the_table_of_data_parallelism_says() -> None:
    """Four micro-batches: reductions once under ZeRO-1, every time under 2; gathering twice every time under 3."""
    frames = {}
    for zero in (0, 1, 2, 3):
        asked = question("llama-3.1-8b", "8xV100-32GB", 16, 32, precision="fp16")
        frames[zero] = Costs(asked.workload, asked.machine).frame(Layout(data=8, zero=zero, micro_batch=1))
    sync = frames[3].sync
    assert sync.reduce_s == pytest.approx(2 * sync.gather_s, rel=0.05)  # float32 against 16 bits
    assert sync.all_reduce_s == pytest.approx(2 * sync.gather_s, rel=0.05)
    times = {zero: frame.step(Levers()).data_s for zero, frame in frames.items()}
    assert times[0] < times[1] < times[2] < times[3]


def test_offloaded_adam_runs_at_the_hosts_speed() -> None:
    found = step("llama-3.1-8b", "H100-80GB", 4096, 1, Layout(micro_batch=1), Levers(offload="optimizer"))
    assert found.offload_s > 8.03e9 / 4.3e9
    eight = step(
        "llama-3.1-8b", "8xH100-80GB", 4096, 8, Layout(data=8, zero=3, micro_batch=1), Levers(offload="optimizer")
    )
    assert eight.offload_s == pytest.approx(found.offload_s, rel=0.25)  # eight ranks share the host and the weights


def test_tensor_ranks_pay_for_slow_links() -> None:
    layout = Layout(tensor=8, micro_batch=1)
    fast = step("llama-3.1-8b", "8xA100-80GB", 4096, 8, layout)
    slow = step("llama-3.1-8b", "8xA100-80GB:pcie", 4096, 8, layout)
    assert slow.tensor_s > 8 * fast.tensor_s
    assert fast.compute_s == pytest.approx(slow.compute_s, rel=0.02)


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
