"""What bounds a routed training step: its kernels by time, and other ways to do the experts' products.

First one step of routed_step.py's workload under the profiler: what the GPU ran, by kernel, and how long it idled.
Then the products of one routed layer alone, with random rows per expert: as routed_mlp.py does them, with gate and up
stacked in one matrix, the routing and the moves around them, and in Triton with gather and GLU inside.
Prints; nothing is written. About a minute on an H200.

    python -m benchmarks.routed_products --case h200-qwen3
    python -m benchmarks.routed_products --case cpu-tiny      (interpreted: add TRITON_INTERPRET=1)
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C._autograd import DeviceType

import tightfit.train.step as train_step_module
from benchmarks.grouped_sum import grouped_sum, tile_table
from benchmarks.routed_step import ROUTED
from benchmarks.train_step import Case, Step, make_ours
from tightfit.kernels.experts.gather_rows import gather_rows
from tightfit.kernels.experts.grouped_matmul import grouped_matmul, grouped_outer
from tightfit.kernels.experts.routed_mlp import Routing, combine, route, routed_mlp
from tightfit.kernels.mlp.glu import activated, glu
from tightfit.kernels.triton_support import HAS_TRITON, is_interpreted, tl, triton
from tightfit.models.layers.routing import choose, scored
from tightfit.models.resolve import resolve_spec
from tightfit.models.spec import ModelSpec

BUDGET_S = 75.0
"""After so long no further alternative is begun."""
TILES = ((128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 64, 64, 4, 4), (64, 128, 64, 4, 3))
"""Of the Triton products: rows, columns (of gate and of up), depth, warps, stages."""
SMALL = ((16, 32, 16, 4, 1),)


@dataclass(frozen=True)
class LayerTensors:
    """One routed layer's tensors: tokens [N, H], routing, and experts' weights apart and stacked."""

    x: Tensor
    weights: Tensor
    routing: Routing
    logits: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    stacked: Tensor
    """gate and up in one, [E, 2F, H]."""

    @property
    def flop(self) -> float:
        """Of one product of all rows with one matrix of their expert."""
        return 2.0 * len(self.routing.tokens) * self.gate.shape[1] * self.gate.shape[2]


def layer_tensors(spec: ModelSpec, case: Case) -> LayerTensors:
    """Random ones of a case's shape."""
    experts = spec.experts
    assert experts is not None
    count, width, hidden, tokens = experts.count, experts.mlp_size, spec.hidden_size, case.batch * case.sequence_length
    with torch.device(case.device):
        x, logits = torch.randn(tokens, hidden).to(case.dtype), torch.randn(tokens, count).to(case.dtype)
        stacked = (torch.randn(count, 2 * width, hidden) * 0.02).to(case.dtype)
        down = (torch.randn(count, hidden, width) * 0.02).to(case.dtype)
    weights, chosen = choose(scored(logits, experts.score), experts)
    gate, up = (half.contiguous() for half in stacked.chunk(2, dim=1))
    return LayerTensors(x, weights.to(case.dtype), route(chosen, count), logits, gate, up, down, stacked)


def profile_step(step: Step, rows: int = 45) -> None:
    """Print what the GPU ran in one step, by kernel."""
    steps_ms = []
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        steps_ms.append((time.perf_counter() - began) * 1e3)
    step_ms = sorted(steps_ms[2:])[4]
    tell_host_time(step)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as made:  # the host as it is
        step()
        torch.cuda.synchronize()
    total, calls = Counter[str](), Counter[str]()
    spans = []
    for event in made.events():
        if event.device_type == DeviceType.CUDA:
            total[event.name] += event.time_range.elapsed_us()
            calls[event.name] += 1
            spans.append((event.time_range.start, event.time_range.end, event.name))
    tell_gaps(spans)
    print(f"step {step_ms:.1f} ms, {sum(calls.values())} kernels, idle {idle_us(spans) / 1e3:.2f} ms while profiled")
    for name, us in total.most_common(rows):
        print(f"  {us / 1e3:8.3f} ms {calls[name]:5d} x {us / calls[name]:8.1f} us  {name[:110]}")


Span = tuple[float, float, str]
"""Of a kernel: its first and last microsecond, and its name."""


def tell_host_time(step: Step) -> None:
    """Print how long the host takes to launch forward and backward, and how long the GPU runs on after it."""
    launched: list[float] = []
    whole = train_step_module.accumulate

    def timed(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        made = whole(*given, **named)
        launched.append((time.perf_counter() - began) * 1e3)
        torch.cuda.synchronize()
        launched.append((time.perf_counter() - began) * 1e3)
        return made

    with patch.object(train_step_module, "accumulate", timed):
        step()
    host_ms, gpu_ms = launched
    print(f"forward and backward: launched by the host in {host_ms:.1f} ms, done by the GPU at {gpu_ms:.1f} ms")


def tell_gaps(spans: list[Span], count: int = 14) -> None:
    """Print the longest times in which no kernel ran, and what stood around them."""
    found, (_, end, last) = [], min(spans)
    begun = min(spans)[0]
    for start, stop, name in sorted(spans):
        if start > end:
            found.append((start - end, end - begun, last, name))
        end, last = max((end, last), (stop, name))
    print(f"{len(found)} gaps of {sum(gap[0] for gap in found) / 1e3:.2f} ms:")
    for gap_us, at_us, before, after in sorted(found, reverse=True)[:count]:
        print(f"  {gap_us:8.0f} us at {at_us / 1e3:6.1f} ms, after {before[:50]}, before {after[:50]}")


def idle_us(spans: list[Span]) -> float:
    """Time between the first and the last in which none ran."""
    idle, end = 0.0, min(start for start, _, _ in spans)
    for start, stop, _ in sorted(spans):
        idle, end = idle + max(0.0, start - end), max(end, stop)
    return idle


def timed_ms(run: Callable[[], Any], device: str, rounds: int = 10) -> float:
    """Mean of `rounds` calls after two."""
    for _ in range(2):
        run()
    if device == "cpu":
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(rounds):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / rounds


Alternative = tuple[str, float, Callable[[], Any]]
"""Name, floating-point operations, and the call."""


def products(t: LayerTensors) -> Iterator[Alternative]:
    """As routed_mlp.py does them, and with gate and up stacked."""
    offsets = t.routing.offsets
    copies = gather_rows(t.x, t.routing.tokens)
    rows, width = len(copies), t.gate.shape[1]
    inner, both = copies.new_empty(rows, width).normal_(), copies.new_empty(rows, 2 * width).normal_()
    yield "gate; up", 2 * t.flop, lambda: [grouped_matmul(copies, w.mT, offsets) for w in (t.gate, t.up)]
    yield "gate and up stacked", 2 * t.flop, lambda: grouped_matmul(copies, t.stacked.mT, offsets)
    yield "down", t.flop, lambda: grouped_matmul(inner, t.down.mT, offsets)
    yield "d_product", t.flop, lambda: grouped_matmul(copies, t.down, offsets)
    yield "dx by gate; by up", 2 * t.flop, lambda: [grouped_matmul(inner, w, offsets) for w in (t.gate, t.up)]
    yield "dx in one", 2 * t.flop, lambda: grouped_sum(inner, inner, t.gate, t.up, offsets, impl="auto")
    yield "dx stacked", 2 * t.flop, lambda: grouped_matmul(both, t.stacked, offsets)
    yield "d_gate; d_up", 2 * t.flop, lambda: [grouped_outer(inner, copies, offsets) for _ in range(2)]
    yield "d_gate and d_up stacked", 2 * t.flop, lambda: grouped_outer(both, copies, offsets)
    yield "d_down", t.flop, lambda: grouped_outer(copies, inner, offsets)
    yield "d_down transposed", t.flop, lambda: grouped_outer(inner, copies, offsets)


def moves(t: LayerTensors, spec: ModelSpec) -> Iterator[Alternative]:
    """Routing, and what moves rows around the products."""
    experts = spec.experts
    assert experts is not None
    made = gather_rows(t.x, t.routing.tokens)
    inner = made.new_empty(len(made), t.gate.shape[1]).normal_()
    scores = scored(t.logits, experts.score)
    chosen = choose(scores, experts)[1]
    yield "scores", 0.0, lambda: scored(t.logits, experts.score)
    yield "choice (topk)", 0.0, lambda: choose(scores, experts)
    yield "topk, unsorted", 0.0, lambda: scores.topk(experts.per_token, dim=-1, sorted=False)
    yield "route (sort)", 0.0, lambda: route(chosen, experts.count)
    yield "gather", 0.0, lambda: gather_rows(t.x, t.routing.tokens)
    yield "glu", 0.0, lambda: glu(inner, inner)
    yield "combine, weighted", 0.0, lambda: combine(made, None, t.weights, t.routing.rows)
    yield "combine of two", 0.0, lambda: combine(made, made, None, t.routing.rows)


def whole_layer(t: LayerTensors) -> Alternative:
    """Forward and backward of the routed MLP."""
    leaves = [each.detach().clone().requires_grad_() for each in (t.x, t.weights, t.gate, t.up, t.down)]
    gradient = torch.randn_like(t.x)

    def run() -> None:
        x, weights, gate, up, down = leaves
        torch.autograd.grad(routed_mlp(x, weights, t.routing, gate, up, down), leaves, gradient)

    return "routed_mlp, forward and backward", 9 * t.flop, run


@triton.jit  # type: ignore[untyped-decorator]
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    tokens_ptr,
    gate_weight_ptr,
    up_weight_ptr,
    offsets_ptr,
    group_ptr,
    row_ptr,
    gate_ptr,
    up_ptr,
    product_ptr,
    depth,
    columns,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """act(x Wg) · (x Wu) of a tile, x gathered; depth and columns are multiples of the tile's."""
    column_tiles = columns // COLUMNS
    tile = tl.program_id(0) // column_tiles
    group = tl.load(group_ptr + tile)
    if group < 0:
        return
    end = tl.load(offsets_ptr + group)
    rows = tl.load(row_ptr + tile) + tl.arange(0, ROWS)
    here = rows < end
    token = tl.load(tokens_ptr + tl.minimum(rows, end - 1)).to(tl.int64)
    n = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x_at = x_ptr + token[:, None] * depth + k[None, :]
    weight_at = group.to(tl.int64) * columns * depth + n[None, :] * depth + k[:, None]
    gate = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    up = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(0, depth, DEPTH):
        x = tl.load(x_at)
        gate = tl.dot(x, tl.load(gate_weight_ptr + weight_at), gate)
        up = tl.dot(x, tl.load(up_weight_ptr + weight_at), up)
        x_at += DEPTH
        weight_at += DEPTH
    at = rows.to(tl.int64)[:, None] * columns + n[None, :]
    value, _ = activated(gate, ACTIVATION)
    tl.store(gate_ptr + at, gate.to(gate_ptr.dtype.element_ty), mask=here[:, None])
    tl.store(up_ptr + at, up.to(gate_ptr.dtype.element_ty), mask=here[:, None])
    tl.store(product_ptr + at, (value * up).to(gate_ptr.dtype.element_ty), mask=here[:, None])


def fused_gate_up(t: LayerTensors, tile: tuple[int, ...]) -> list[Tensor]:
    """gate, up and their product, of gathered tokens."""
    rows, columns, depth, warps, stages = tile
    width, hidden = t.gate.shape[1:]
    tokens, offsets = t.routing.tokens, t.routing.offsets
    table = tile_table(offsets, len(tokens), rows)
    outs = [t.x.new_empty(len(tokens), width) for _ in range(3)]
    grid = (table.shape[1] * (width // columns),)
    given = (t.x, tokens, t.gate, t.up, offsets, *table, *outs, hidden, width)
    _gate_up_kernel[grid](
        *given, ACTIVATION="silu", ROWS=rows, COLUMNS=columns, DEPTH=depth, num_warps=warps, num_stages=stages
    )
    return outs


def fused(t: LayerTensors, device: str) -> Iterator[Alternative]:
    """Triton products, once their results agree with those of two products and a pass."""
    tokens, offsets = t.routing.tokens, t.routing.offsets
    copies = gather_rows(t.x, tokens)
    gate, up = (grouped_matmul(copies, w.mT, offsets) for w in (t.gate, t.up))
    expected = glu(gate, up)
    for tile in TILES if device == "cuda" else SMALL:
        torch.testing.assert_close(fused_gate_up(t, tile)[2], expected, rtol=3e-2, atol=3e-2)
        yield f"gather, gate, up and glu in one {tile}", 2 * t.flop, lambda tile=tile: fused_gate_up(t, tile)  # type: ignore[misc]


def alternatives(t: LayerTensors, spec: ModelSpec, device: str) -> Iterator[Alternative]:
    """Everything to time."""
    yield whole_layer(t)
    yield from products(t)
    yield from moves(t, spec)
    if HAS_TRITON and (device == "cuda" or is_interpreted()):
        yield from fused(t, device)


def run(name: str) -> None:
    """Profile a step and time the alternatives of one case."""
    began = time.perf_counter()
    case = ROUTED[name]
    spec = case.reshape(resolve_spec(case.model))
    if case.device == "cuda":
        drawn = torch.randint(0, spec.vocab_size, (case.batch, case.sequence_length + 1))
        profile_step(make_ours(spec, case, {"tokens": drawn[:, :-1], "labels": drawn[:, 1:].contiguous()}))
        torch.cuda.empty_cache()
    print(f"one routed layer of {name}, after {time.perf_counter() - began:.0f} s:")
    for label, flop, call in alternatives(layer_tensors(spec, case), spec, case.device):
        ms = timed_ms(call, case.device)
        rate = f"{flop / ms / 1e9:6.0f} TFLOP/s" if flop else ""
        print(f"  {ms:8.3f} ms {rate:>15}  {label}", flush=True)
        if time.perf_counter() - began > BUDGET_S:
            print("  no time left for the others")
            return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=ROUTED, action="append", required=True)
    for chosen_case in parser.parse_args().case:
        run(chosen_case)
