"""The figures everybody quotes, the constants the code has, and what must hold whatever the numbers are."""

import cProfile
import random
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from operator import le
from pathlib import Path
from typing import Any

import pytest

from tests.covering import sampled
from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.levers.policy.loss_chunks import padded
from tightfit.memory.formulas import gpt
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.loss import logits_chunk_bytes, loss_cost
from tightfit.memory.formulas.overheads import Overheads
from tightfit.memory.formulas.params import embedding_params, layer_params, vocabulary_params
from tightfit.memory.formulas.pipeline import micro_batches_in_flight, rank_spans
from tightfit.memory.formulas.serving import (
    cache_bytes,
    cache_bytes_per_token,
    seen_cache_bytes,
    serving_ledger,
    weight_bytes,
)
from tightfit.memory.formulas.training import least_peaks, peaks, training_ledger
from tightfit.models.presets import preset, preset_names

GIB = 2**30
BARE = Overheads(0, 0, 0)
STEP = ("forward", "loss", "backward", "optimizer")


def workload(model: str = "llama-3.1-8b", length: int = 4096, batch: int = 64, precision: Any = "bf16") -> Workload:
    return Workload(spec=preset(model), sequence_length=length, global_batch=batch, precision=precision)


def peak_of(model: str = "llama-3.1-8b", layout: dict[str, Any] | None = None, **levers: Any) -> int:
    given = {"micro_batch": 1, **(layout or {})}
    return peaks(workload(model), Layout.model_validate(given), Levers.model_validate(levers), BARE).gpu_bytes


@pytest.mark.parametrize(
    ("precision", "form", "total"),
    [
        ("bf16", "auto", 16),
        ("fp16", "auto", 16),
        ("fp32", "auto", 16),
        ("pure-bf16", "auto", 8),
        ("bf16", "bf16", 12),
        ("bf16", "8bit", 10 + 2 / 64),
        ("bf16", "fp32", 16),
        ("pure-bf16", "fp32", 12),
        ("pure-bf16", "8bit", 6 + 2 / 64),
        ("bf16", "factored", 10),
        ("pure-bf16", "bf16", 8),
    ],
)
def test_bytes_per_weight_by_precision_and_states(precision: str, form: Any, total: float) -> None:
    """Weights, gradients, master weights and moments on one GPU, when the optimizer begins."""
    asked = workload(precision=precision)
    ledger = training_ledger(asked, Layout(micro_batch=1), Levers(optimizer_states=form), BARE)
    states = ("weights", "gradients", "master weights", "optimizer states")
    held = [line.bytes for line in ledger.lines if (line.phase, line.detail) == ("optimizer", "") and line.bytes]
    assert {line.component for line in ledger.lines if line.detail == ""} <= {*states, "cuda context"}
    assert sum(held) / asked.spec.params() == pytest.approx(total, rel=1e-6)


def test_the_classic_layer_by_row() -> None:
    b, s, h, a = 1, 16384, 4096, 32
    assert gpt.layer_bytes(b, s, h, a, "attention") == 13 * b * s * h + 5 * b * s * s * a
    assert gpt.layer_bytes(b, s, h, a, "mlp") == 21 * b * s * h
    by_name = {row.name: (row.bsh, row.bssa) for row in gpt.ROWS if row.half == "attention"}
    assert by_name["queries and keys"] == (4, 0)
    assert by_name["scores (softmax output)"] == (0, 2)
    assert by_name["softmax dropout mask"] == (0, 1)
    assert [row.bsh for row in gpt.ROWS if row.half == "mlp"] == [2, 8, 8, 1, 2]
    assert gpt.layer_bytes(b, s, h, a) / GIB == 40 + 2.125  # scores, which flash attention does not keep, and all else
    assert gpt.model_bytes(b, s, h, a, 32) / GIB / 1000 == pytest.approx(1.35, abs=0.005)


def test_logits_of_two_long_rows() -> None:
    spec = preset("llama-3.1-8b")
    shape = LocalShape(spec, rows=2, length=32768, element_bytes=2)
    count = 2 * 32768 * 128256
    assert round(2 * count / GIB, 1) == 15.7
    assert round(4 * count / GIB, 1) == 31.3
    plain = loss_cost(shape, fused=False, allowed_bytes=0)
    hidden = 2 * shape.tokens * spec.hidden_size
    assert plain.forward - hidden == (2 + 4 + 4) * count
    assert plain.backward - hidden == (4 + 4 + 4) * count, "log-softmax, its gradient and its input's"
    fused = loss_cost(shape, fused=True, allowed_bytes=256 * 2**20)
    assert fused.logits < 2 * count / 10
    assert fused.forward < plain.forward / 18
    assert fused.wide_weight_gradient == 4 * 128256 * 4096


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype_bytes", [2, 4])
def test_a_chunk_is_the_fused_losss_own(training: bool, dtype_bytes: int) -> None:
    import torch

    from tightfit.kernels.loss.linear_cross_entropy import rows_at_a_time

    dtype = {2: torch.bfloat16, 4: torch.float32}[dtype_bytes]
    hidden, weight = (torch.empty(size, 64, dtype=dtype, device="meta") for size in (4096, 5001))
    rows = rows_at_a_time(hidden, weight, 2**20, weight_gradient=training, triton=True)
    spec = replace(preset("tiny-llama"), vocab_size=5001, hidden_size=64)
    shape = LocalShape(spec, rows=1, length=4096, element_bytes=dtype_bytes)
    found = logits_chunk_bytes(shape, 2**20, training=training)
    assert found == rows * padded(5001) * dtype_bytes


@pytest.mark.parametrize("name", preset_names())
def test_params_add_up_to_the_models(name: str) -> None:
    spec = preset(name)
    shape = LocalShape(spec, rows=1, length=1, element_bytes=2)
    layers = sum(layer_params(shape, layer).all for layer in range(spec.layers))
    head = 0 if spec.tied else vocabulary_params(shape)
    assert layers + embedding_params(shape) + spec.norm_params + head == spec.params()


@sampled(4)
@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "gemma-2-9b", "gpt2-xl", "mixtral-8x7b", "qwen3-30b-a3b", "smollm2-135m"]
)
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"data": 8},
        {"data": 8, "zero": 1},
        {"data": 8, "zero": 2},
        {"data": 8, "zero": 3},
        {"tensor": 4},
        {"pipeline": 4},
        {"pipeline": 4, "schedule": "interleaved", "stages_per_rank": 2},
        {"context": 4},
        {"pipeline": 2, "tensor": 2, "data": 4, "zero": 1},
    ],
)
def test_the_quick_view_is_the_ledgers(name: str, layout: dict[str, Any]) -> None:
    given = Layout.model_validate({"micro_batch": 1, **layout})
    run = workload(name, length=1024)
    for levers in (Levers(), Levers(checkpoint_every=1), Levers(offload="optimizer"), Levers(loss="plain")):
        ledger = training_ledger(run, given, levers)
        gpu, host, _ = peaks(run, given, levers)
        assert gpu == ledger.peak_bytes()
        assert host == max(
            sum(line.bytes for line in ledger.at("backward", rank, "host")) for rank in range(given.pipeline)
        )
        assert {phase for phase, _ in ledger.moments()} >= {"init", "forward", "loss", "backward", "optimizer"}


@pytest.mark.thorough
def test_the_quick_view_is_the_fullest_rank_of_any_pipeline() -> None:
    """Whatever is recomputed, however stages are cut and however few micro-batches there are."""
    chance = random.Random(0)
    for _ in range(300):
        schedule = chance.choice(["gpipe", "1f1b", "interleaved", "zero-bubble"])
        layout = Layout.model_validate(
            {
                "micro_batch": 1,
                "pipeline": chance.choice([2, 3, 4, 6, 8]),
                "schedule": schedule,
                "stages_per_rank": chance.choice([2, 3]) if schedule == "interleaved" else 1,
                "data": 2,
                "zero": chance.choice([0, 1]),
            }
        )
        which = chance.choice([{}, {"checkpoint_every": chance.choice([1, 2, 3, 4])}, {"num_checkpoints": 5}])
        levers = Levers.model_validate(which | {"offload": chance.choice(["none", "none", "optimizer"])})
        model = chance.choice(["llama-3.1-8b", "gemma-2-9b", "qwen3-30b-a3b", "gpt2-xl", "gemma-3-12b"])
        run = workload(model, length=chance.choice([256, 1024]), batch=2 * chance.choice([1, 2, 4, 8, 32]))
        ledger = training_ledger(run, layout, levers)
        assert peaks(run, layout, levers).gpu_bytes == max(
            ledger.total(lambda line, at=at: (line.phase, line.rank, line.place) == (*at, "gpu"))  # type: ignore[misc]
            for at in ledger.moments()
            if at[0] in STEP
        ), (model, layout, levers)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_that_wait_for_the_host_are_shards_under_zero(zero: int) -> None:
    """70B on eight cards: each updates an eighth of the weights, and has gradients of no more when forward begins."""
    run, spec = workload("llama-3.1-70b", length=1024, batch=8), preset("llama-3.1-70b")
    layout = Layout.model_validate({"micro_batch": 1, "data": 8, "zero": zero})
    ledger = training_ledger(run, layout, Levers(offload="optimizer", checkpoint_every=1), BARE)
    assert ledger.by_component("forward").get("gradients", 0) <= 4 * spec.params() / 8
    alone = training_ledger(replace(run, global_batch=1), Layout(micro_batch=1), Levers(offload="optimizer"), BARE)
    assert alone.by_component("forward")["gradients"] > 2 * 0.98 * spec.params(), "one card has all of them"


@pytest.mark.parametrize("name", ["llama-3.2-1b", "mixtral-8x7b", "gemma-2-2b", "gpt2-xl"])
def test_the_least_is_never_more_than_the_peak(name: str) -> None:
    """What a search rules out without a look at activations does not fit."""
    layouts: list[dict[str, Any]] = [
        {},
        {"data": 8},
        *({"data": 8, "zero": zero} for zero in (1, 2, 3)),
        {"tensor": 2, "data": 4, "zero": 1},
        {"pipeline": 4, "data": 2},
        {"pipeline": 2, "schedule": "zb-v", "stages_per_rank": 2},
        {"data": 8, "zero": 3, "expert": 4 if name.startswith("mixtral") else 1},
    ]
    sets: list[dict[str, Any]] = [
        {"checkpoint_every": every, "offload": offload, "optimizer_states": states, "update_in_backward": early}
        for every, offload in ((0, "none"), (1, "optimizer"), (1, "weights"))
        for states in ("auto", "8bit")
        for early in (False, True)
    ]
    asked = workload(name, length=64, batch=8)
    for layout in (Layout.model_validate({"micro_batch": 1, **each}) for each in layouts):
        for levers in (Levers.model_validate(each) for each in sets):
            least, needed = least_peaks(asked, layout, levers), peaks(asked, layout, levers)
            assert all(map(le, least, needed)), (layout, levers, least, needed)


@pytest.mark.parametrize("axis", ["data-0", "data-1", "data-2", "data-3", "tensor", "pipeline", "context"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "gemma-2-9b"])
def test_more_ranks_never_need_more(axis: str, name: str) -> None:
    """From two data ranks on: the first wraps the model in an engine, whose buffers one GPU does without.

    Under ZeRO to as many as there are experts: FSDP2 deals out whole ones, and gathers padding for ranks without any.
    """
    kind, _, zero = axis.partition("-")
    degrees: tuple[int, ...] = (2, 4, 8, 16) if kind in ("data", "context") else (1, 2, 4, 8)
    experts = preset(name).experts
    if zero not in ("", "0") and experts is not None:
        degrees = tuple(degree for degree in degrees if degree <= experts.count)
    layouts = [{kind: degree, "zero": int(zero or 0)} for degree in degrees]
    for levers in ({}, {"checkpoint_every": 1}):
        peaks = [peak_of(name, layout, **levers) for layout in layouts]
        assert all(more <= less for less, more in pairwise(peaks))


def test_updates_in_backward_leave_one_layers_gradients_at_most() -> None:
    one = workload(batch=1)
    usual, inside = (
        peaks(one, Layout(micro_batch=1), Levers(checkpoint_every=1, update_in_backward=inside), BARE).gpu_bytes
        for inside in (False, True)
    )
    spec = preset("llama-3.1-8b")
    layer, vocabulary = spec.layer_params(0), spec.vocab_size * spec.hidden_size
    assert 2 * (spec.params() - 2 * layer - 2 * vocabulary) < usual - inside < 2 * spec.params() + 2**30


def test_levers_lower_the_peak_and_higher_stages_are_smaller() -> None:
    assert peak_of(checkpoint_every=1) < peak_of(checkpoint_every=2) < peak_of()
    assert peak_of(loss="fused") < peak_of(loss="plain")
    assert peak_of(offload="weights") < peak_of(offload="optimizer") < peak_of()
    assert peak_of(tiles=8) < peak_of(tiles=1)
    assert peak_of(optimizer_states="8bit") < peak_of(optimizer_states="bf16") < peak_of()
    by_stage = [peak_of(layout={"data": 8, "zero": zero}, checkpoint_every=1) for zero in (0, 1, 2, 3)]
    assert by_stage == sorted(by_stage, reverse=True)
    assert len(set(by_stage)) == 4
    given = Layout(micro_batch=1)
    moved = peaks(workload(), given, Levers(checkpoint_every=1, offload_checkpoints=True), BARE)
    kept = peaks(workload(), given, Levers(checkpoint_every=1), BARE)
    assert moved.gpu_bytes < kept.gpu_bytes
    assert moved.host_bytes == 31 * 4096 * 4096 * 2, "the last one stays"


def test_sequence_parallelism_splits_what_tensor_ranks_repeat() -> None:
    split = peak_of(layout={"tensor": 8}, checkpoint_every=1)
    repeated = peak_of(layout={"tensor": 8, "sequence_parallel": False}, checkpoint_every=1)
    assert split < repeated


def test_8b_on_known_cards() -> None:
    """Adam in mixed precision does not fit one 80 GB card; eight of them train 16 K tokens under ZeRO-3."""
    one = peaks(workload(length=512, batch=1), Layout(micro_batch=1), Levers(checkpoint_every=1)).gpu_bytes
    assert one > 80e9
    eight = Layout(micro_batch=1, data=8, zero=3)
    assert peaks(workload(length=16384, batch=8), eight, Levers(checkpoint_every=1)).gpu_bytes < 80e9
    v100 = peaks(workload(length=512, batch=8, precision="fp16"), eight, Levers(checkpoint_every=1)).gpu_bytes
    assert 18.78e9 < v100 < 32e9, "DeepSpeed's estimator said 18.78 GB; 24 to 32 were measured"


def test_pipelines_hold_what_their_schedules_say() -> None:
    one = {rank: micro_batches_in_flight(Layout(pipeline=4), rank, 16) for rank in range(4)}
    assert one == {0: (4,), 1: (3,), 2: (2,), 3: (1,)}
    assert micro_batches_in_flight(Layout(pipeline=4), 0, 2) == (2,)
    assert micro_batches_in_flight(Layout(pipeline=4, schedule="gpipe"), 3, 16) == (16,)
    assert micro_batches_in_flight(Layout(pipeline=4, schedule="zero-bubble"), 3, 16) == (4,)
    interleaved = Layout(pipeline=4, schedule="interleaved", stages_per_rank=2)
    assert [micro_batches_in_flight(interleaved, rank, 16) for rank in range(4)] == [(7, 4), (5, 4), (4, 3), (4, 1)]
    in_v = Layout(pipeline=4, schedule="zb-v", stages_per_rank=2)
    assert [micro_batches_in_flight(in_v, rank, 16) for rank in range(4)] == [(7, 1), (6, 2), (5, 3), (4, 4)]
    small = replace(preset("llama-3.1-8b"), layers=30, vocab_size=64)
    spans = [span[1:3] for span in rank_spans(small, 4096, Layout(pipeline=4))]
    assert spans == [(0, 7), (7, 15), (15, 23), (23, 30)], "the embedding counts too"
    two_each = Layout(pipeline=2, schedule="interleaved", stages_per_rank=2)
    pieces = [span[1:3] for span in rank_spans(small, 4096, two_each)]
    assert pieces == [(0, 15), (15, 30)]


def test_every_pipeline_rank_has_its_lines() -> None:
    ledger = training_ledger(workload(), Layout(micro_batch=1, pipeline=4), Levers())
    kept = {rank: ledger.by_component("forward", rank)["activations"] for rank in range(4)}
    assert kept[0] > kept[1] > kept[2] > kept[3]
    assert {rank for phase, rank in ledger.moments() if phase == "loss"} == {3}


def test_gpipe_holds_the_fused_losss_gradients_of_every_micro_batch() -> None:
    """The fused loss makes the output projection's gradient in forward, float32, and GPipe does all forwards first."""
    run, levers = workload(batch=8), Levers(checkpoint_every=1)
    held = {}
    for schedule in ("1f1b", "gpipe"):
        layout = Layout.model_validate({"micro_batch": 1, "pipeline": 2, "schedule": schedule})
        held[schedule] = training_ledger(run, layout, levers, BARE).by_component("loss", 1)["activations"]
    assert held["gpipe"] - held["1f1b"] > 7 * 4 * 128256 * 4096


def test_experts_on_several_ranks_divide_their_weights_and_need_buffers() -> None:
    layouts = [{"data": 8, "zero": 1, "expert": expert} for expert in (1, 2, 8)]
    peaks = [peak_of("mixtral-8x7b", layout, checkpoint_every=1) for layout in layouts]
    assert peaks[0] > peaks[1] > peaks[2]
    alone = LocalShape(preset("mixtral-8x7b"), rows=1, length=1, element_bytes=2)
    assert layer_params(replace(alone, expert=8), 0).experts * 8 == layer_params(alone, 0).experts


def test_served_8b_at_q8_0_fits_a_t4() -> None:
    spec = preset("llama-3.1-8b")
    assert weight_bytes(spec, "bf16") == 2 * spec.params()
    assert 8.5e9 < weight_bytes(spec, "q8_0") < 8.6e9
    assert 4.5e9 < weight_bytes(spec, "q4_0") < 4.6e9
    assert cache_bytes_per_token(spec) == 2 * 8 * 128 * 2 * 32 == 131072
    assert cache_bytes(spec, 4, 8192) == 4 * 8192 * 131072
    assert serving_ledger(spec, form="q8_0", requests=4, length=8192).peak_bytes() < 16e9


def test_windows_bound_what_a_step_reads_of_the_cache() -> None:
    spec = preset("gemma-2-9b")  # every other layer sees 4,096 positions
    assert seen_cache_bytes(spec, 1, 4096) == 4096 * cache_bytes_per_token(spec)
    assert seen_cache_bytes(spec, 1, 8192) == (4096 + 8192) // 2 * cache_bytes_per_token(spec)


def test_negative_overheads_get_a_sentence() -> None:
    with pytest.raises(UserError, match="slack_share is -1; give 0 or more"):
        Overheads(slack_share=-1)


def test_formulas_need_neither_torch_nor_numpy() -> None:
    names = [f"tightfit.memory.formulas.{path.stem}" for path in Path(gpt.__file__).parent.glob("*.py")]
    assert len(names) > 10
    code = f"import sys\nfor name in {names!r}: __import__(name)\n"
    code += "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_search_can_ask_often() -> None:
    """Counted in calls, which no busy machine changes: a few hundred once shapes have been seen, of 223,000 before."""
    run, levers = workload("llama-3.1-405b", batch=1024), Levers(checkpoint_every=1)
    layout = Layout(micro_batch=1, data=16, zero=3, tensor=8, pipeline=8)
    peaks(run, layout, levers)
    profile = cProfile.Profile()
    profile.runcall(peaks, run, layout, levers)
    # pstats would keep one of the functions that have the same name and line, whichever comes last
    assert sum(entry.callcount for entry in profile.getstats()) < 700
