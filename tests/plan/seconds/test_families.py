"""What other families' steps are made of, against what it comes to by hand."""

from dataclasses import replace

import pytest

from tests.plan.questions import question
from tightfit.hardware.launches import (
    BIAS,
    LATE_UPDATE_MS,
    LAYER,
    MATRIX_UPDATE_MS,
    NORM,
    ROPE_AND_GATE,
    UPDATE_MS,
    VECTOR_UPDATE_MS,
)
from tightfit.hardware.machine import parse_machine
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.models.resolve import resolve_spec
from tightfit.models.spec import ModelSpec
from tightfit.plan.cost import Costs, LayoutCost
from tightfit.plan.seconds.launches import late_update_launch_s, launch_s, layer_tensors, layer_vectors
from tightfit.plan.seconds.long_kernels import long_kernels
from tightfit.plan.seconds.passes import PassSeconds
from tightfit.plan.seconds.products import head_filled_share
from tightfit.plan.seconds.recompute import NONE, recompute

H200 = parse_machine("H200")


def cost(model: str | ModelSpec, length: int, rows: int = 1) -> LayoutCost:
    spec = resolve_spec(model) if isinstance(model, str) else model
    spec = replace(spec, max_positions=max(length, spec.max_positions))
    workload = Workload(spec=spec, sequence_length=length, global_batch=rows)
    return Costs(workload, H200).layout_cost(Layout(micro_batch=rows))


def test_windows_and_caps_take_our_attention_kernel() -> None:
    plain = resolve_spec("mistral-7b")
    windowed = replace(plain, window=4096, window_layers=tuple(range(plain.layers)))
    capped = replace(plain, attention_softcap=50.0)
    specs = {"plain": plain, "window": windowed, "cap": capped}
    rates = {name: cost(spec, 8192).ctx.rates for name, spec in specs.items()}
    assert rates["plain"].own_attention == rates["plain"].attention
    assert rates["window"].own_attention == rates["cap"].own_attention != rates["window"].attention
    assert rates["plain"].attention.forward_flop_s > 1.2 * rates["window"].own_attention.forward_flop_s
    short = cost(windowed, 2048).ctx.rates
    assert short.own_attention == short.attention, "the window holds the row whole"


def test_layers_of_both_kinds_take_their_own_kernels() -> None:
    plain = resolve_spec("mistral-7b")
    half, windowed = (
        replace(plain, window=4096, window_layers=tuple(range(0, plain.layers, every))) for every in (2, 1)
    )
    times = [cost(spec, 8192).layer.attention.backward_s for spec in (plain, half, windowed)]
    assert times[1] == pytest.approx((times[0] + times[2]) / 2)


def test_a_small_head_leaves_multiprocessors_idle() -> None:
    """Gemma-3-270m: chunks of 1024 of 16 384 tokens, 8 × 3 tiles on 132 multiprocessors, where sums are split."""
    share = head_filled_share(resolve_spec("gemma-3-270m"), tokens=16_384, tensor=1)
    assert share == 0.33
    qwen = head_filled_share(resolve_spec("qwen2.5-0.5b"), tokens=16_384, tensor=1)
    assert qwen == pytest.approx(12 * 4 / 132)
    llama = head_filled_share(resolve_spec("llama-3.1-8b"), tokens=8192, tensor=1)
    assert llama == 1.0


def test_an_odd_vocabulary_slows_the_head_on_hopper_alone() -> None:
    odd, even = (cost(replace(resolve_spec("gpt2"), vocab_size=size), 1024, 32).layer for size in (50_257, 50_304))
    assert odd.head_forward_s == pytest.approx(4 * even.head_forward_s, rel=0.01)
    on_a100 = [
        Costs(
            Workload(spec=replace(resolve_spec("gpt2"), vocab_size=size), sequence_length=1024, global_batch=1),
            parse_machine("A100-80GB"),
        ).layout_cost(Layout(micro_batch=1))
        for size in (50_257, 50_304)
    ]
    assert on_a100[0].layer.head_forward_s == pytest.approx(on_a100[1].layer.head_forward_s, rel=0.01)


def test_routed_rows_are_gathered_and_added_up() -> None:
    """Three and seven passes over eight copies of every token, in bf16."""
    spec = resolve_spec("qwen3-30b-a3b")
    assert spec.experts is not None
    routed = cost(spec, 4096).layer.elementwise
    fewer = cost(replace(spec, experts=replace(spec.experts, per_token=4, mlp_size=1536)), 4096).layer.elementwise
    bytes_each = 4 * 4096 * spec.hidden_size * 2
    bytes_s = cost(spec, 4096).ctx.rates.bytes_s
    assert routed.mlp_s - fewer.mlp_s == pytest.approx(3 * bytes_each / bytes_s)
    assert routed.passes.backward_s - fewer.passes.backward_s == pytest.approx(7 * bytes_each / bytes_s)


def test_more_norms_and_biases_are_more_launches() -> None:
    plain = resolve_spec("llama-3.2-1b")
    forward_s, backward_s = launch_s(Levers(), NONE, 10, plain)
    normed = launch_s(Levers(), NONE, 10, replace(plain, qk_norm=True, sandwich_norms=True))
    assert normed[0] - forward_s == pytest.approx(40e-3 * NORM.forward_ms)
    biased = launch_s(Levers(), NONE, 10, replace(plain, qkv_bias=True))
    assert biased[1] - backward_s == pytest.approx(30e-3 * BIAS.backward_ms)


def test_matrices_are_updated_inside_backward_and_vectors_after_it() -> None:
    llama, gpt2 = resolve_spec("llama-3.2-1b"), resolve_spec("gpt2")
    assert (layer_tensors(llama), layer_vectors(llama)) == (9, 2)
    assert (layer_tensors(gpt2), layer_vectors(gpt2)) == (6 + 6 + 4, 6 + 4)
    inside = Levers(update_in_backward=True, cuda_graph="never")
    fewer = launch_s(inside, NONE, 1, gpt2)[1] - launch_s(inside, NONE, 1, llama)[1]
    assert fewer == pytest.approx(1e-3 * (6 * BIAS.backward_ms - ROPE_AND_GATE.backward_ms - MATRIX_UPDATE_MS))
    late_s = late_update_launch_s(gpt2, layers=12)
    assert late_s == pytest.approx(1e-3 * (LATE_UPDATE_MS + 120 * VECTOR_UPDATE_MS))
    asked = question("gpt2", "H200", 1024, 1)
    times = [Costs(asked.workload, asked.machine, layer_launch_ms=ms).step(Layout(), inside) for ms in (3.0, 6.0)]
    plain_ms = sum(LAYER[""]) + UPDATE_MS[""]
    assert times[1].optimizer_s - times[0].optimizer_s == pytest.approx(3.0 / plain_ms * late_s)


def test_the_link_stands_still_while_a_layers_long_kernels_run() -> None:
    """Masters wait for a multiprocessor, but for two pieces of them that may have arrived before."""
    levers = Levers(offload="weights", update_in_backward=True, checkpoint_every=1)
    still = {}
    for length in (2048, 32_768):
        asked = question("llama-3.1-8b", "H200", length, 1)
        cost = Costs(asked.workload, asked.machine).layout_cost(Layout(micro_batch=1))
        again = recompute(asked.workload, cost.layout, levers, cost.layer, 32)
        kernels = long_kernels(asked.workload.spec, cost.layer, levers, again, 32)
        still[length] = kernels.stalls(forward_ahead_s=0.6e-3, backward_ahead_s=3e-3)
        passes = cost.passes.plus(PassSeconds(backward_s=again.seconds))
        moving = cost.offload(levers).moving(passes, kernels)
        ahead_s = 2 * 2**22 * 4 / asked.machine.host_copy_bytes_s
        expected = kernels.stalls(forward_ahead_s=ahead_s, backward_ahead_s=ahead_s)
        assert moving == pytest.approx([whole - part for whole, part in zip(passes, expected, strict=True)])
    attention_s, products = cost.layer.attention, cost.layer.products
    each_s = [products.qkv_s, products.output_s, products.up_s / 2, products.up_s / 2, products.down_s]
    forward_s = 32 * sum(max(0.0, seconds - 0.6e-3) for seconds in (attention_s.forward_s, *each_s))
    again_s = sum(max(0.0, seconds - 3e-3) for seconds in (attention_s.forward_s, *each_s[:-1]))
    backward_s = 32 * (attention_s.backward_s - 3e-3 + 2 * sum(max(0.0, s - 3e-3) for s in each_s) + again_s)
    assert still[32_768] == pytest.approx((forward_s, backward_s))
    assert still[2048] == (0.0, 0.0)  # nothing of a short row runs so long
