"""Rates that a machine reaches: products, attention, copies, the host link, the host's update and launches.

The measurements behind `tightfit calibrate` (shapes that fit any card, under a minute) and behind the tables of
benchmarks/calibrate.py (more shapes). Nothing here is a training step of a real model, so predictions of steps stay
predictions.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tightfit.jobs.job import PrecisionName
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.kernels.attention.attention import AttentionMask, attention
from tightfit.kernels.optimizer.adamw import Numbers
from tightfit.levers.host_update import fused_adamw
from tightfit.models.decoder import Implementations
from tightfit.models.presets import preset
from tightfit.models.spec import ModelSpec
from tightfit.prove.rehearsal import Program, build
from tightfit.prove.timing import Do, looped_ms, timed_ms
from tightfit.train.short_collections import short_collections
from tightfit.train.step import ignore

FEW_LAYERS, MORE_LAYERS = 2, 8
STEPS, TURNS = 3, 9
HEADS, KV_HEADS = 16, 4


class Product(NamedTuple):
    """One of the three products of a linear layer: milliseconds, TFLOP, and GB read and written once."""

    name: str
    ms: float
    tflop: float
    gb: float


def products(device: torch.device, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> Iterator[Product]:
    """y = x Wᵀ, dx = dy W and dW = dyᵀ x of x [rows, inputs] and W [outputs, inputs]."""
    shapes = ((rows, inputs), (rows, outputs), (outputs, inputs))
    x, dy, weight = (torch.randn(*shape, device=device).to(dtype) for shape in shapes)
    outs = [torch.empty_like(tensor) for tensor in (dy, x, weight)]
    does: dict[str, Do] = {
        "y": partial(torch.mm, x, weight.t(), out=outs[0]),
        "dx": partial(torch.mm, dy, weight, out=outs[1]),
        "dW": partial(torch.mm, dy.t(), x, out=outs[2]),
    }
    moved_gb = sum(tensor.nbytes for tensor in outs) / 1e9
    for name, do in does.items():
        yield Product(name, timed_ms(do, device), 2e-12 * rows * inputs * outputs, moved_gb)


def sustained_tflop_s(device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> float:
    """The rate of square products in a row for `seconds`, so that clocks settle; the second half is measured."""
    x = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(x)
    do = partial(torch.mm, x, x, out=out)
    once_ms = looped_ms(do, 2, device)
    count = max(2, int(seconds * 500 / max(once_ms, 1e-3)))
    looped_ms(do, count, device)
    return 2e-9 * size**3 / looped_ms(do, count, device)


@dataclass(frozen=True)
class AttentionTimes:
    """Milliseconds and TFLOP of forward; backward has 2.5 times the work."""

    forward_ms: float
    backward_ms: float
    tflop: float


def attention_times(device: torch.device, dtype: torch.dtype, rows: int, length: int, head: int) -> AttentionTimes:
    """Times of causal attention of 16 heads over 4 key/value heads, called as the decoder calls it."""
    tensors = [
        torch.randn(rows, length, heads, head, device=device).to(dtype).transpose(1, 2).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    query, key, value = tensors
    mask = AttentionMask(length, length, device, None)
    do = partial(attention, query, key, value, mask, scale=head**-0.5)
    with torch.no_grad():
        forward_ms = timed_ms(do, device, graph=False)
    out = do()
    backward = partial(torch.autograd.grad, out, tensors, torch.ones_like(out), retain_graph=True)
    tflop = 4e-12 * rows * HEADS * head * length**2 / 2
    return AttentionTimes(forward_ms, timed_ms(backward, device, graph=False), tflop)


def copy_ms(device: torch.device, count: int) -> tuple[float, float]:
    """A copy of `count` float32 on the device: milliseconds, and GB read and written."""
    source = torch.zeros(count, device=device)
    target = torch.empty_like(source)
    return timed_ms(partial(target.copy_, source), device), 2 * source.nbytes / 1e9


class LinkBuffers:
    """Pinned host memory and device memory of `count` float32 each, and copies between them."""

    def __init__(self, device: torch.device, count: int) -> None:
        on_gpu = device.type == "cuda"
        self.device = device
        self.host = [torch.zeros(count, pin_memory=on_gpu) for _ in range(4)]
        self.there = [torch.zeros(count, device=device) for _ in range(2)]
        self.streams = [torch.cuda.Stream(device) if on_gpu else None for _ in range(2)]

    @property
    def gb(self) -> float:
        """Gigabytes of one copy."""
        return self.host[0].nbytes / 1e9

    def travel(self, *, into: bool = False, out: bool = False, beside: Callable[[], object] | None = None) -> None:
        """Queue copies `into` the device, `out` of it or both, and eight calls of `beside` meanwhile."""
        ways = (
            (into, self.streams[0], self.there[0], self.host[0]),
            (out, self.streams[1], self.host[1], self.there[1]),
        )
        for wanted, stream, target, source in ways:
            if wanted:
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        for _ in range(8 if beside else 0):
            assert beside is not None
            beside()

    def ms(self, *, into: bool = False, out: bool = False, beside: Callable[[], object] | None = None) -> float:
        """Milliseconds of one `travel` out of four in a row."""
        return looped_ms(partial(self.travel, into=into, out=out, beside=beside), 4, self.device)

    def host_adam_ms(self) -> float:
        """Milliseconds of AdamW on one buffer on the host's cores."""
        weights, gradients, first, second = self.host
        do = partial(fused_adamw, weights, gradients, first, second, Numbers(1e-3, 0.9, 0.95, 1e-8, 0.1, 1))
        do()
        return looped_ms(do, 3, self.device)


def narrow_spec(layers: int, size: int) -> ModelSpec:
    """A small model of the usual family: grouped heads and a gated MLP."""
    return replace(
        preset("llama-3.2-1b"),
        layers=layers,
        hidden_size=size,
        heads=8,
        kv_heads=4,
        head_dim=size // 4,
        mlp_size=2 * size,
        vocab_size=4 * size,
    )


def layer_launch_ms(device: torch.device, size: int = 256) -> float:
    """Milliseconds to launch a layer's forward, backward and update, from models so narrow that the GPU waits.

    Hosts are slower at times: models of two depths are timed alternately, and the median difference counts.
    """
    few, more = (_narrow_program(device, narrow_spec(layers, size)) for layers in (FEW_LAYERS, MORE_LAYERS))
    for program in (few, more, few, more):
        program.step(ignore)
    with short_collections(device):
        taken = [_steps_ms(device, more) - _steps_ms(device, few) for _ in range(TURNS)]
    return max(0.0, statistics.median(taken) / (MORE_LAYERS - FEW_LAYERS))


def _narrow_program(device: torch.device, spec: ModelSpec) -> Program:
    precision: PrecisionName = "bf16" if device.type == "cuda" else "fp32"
    workload = Workload(spec=spec, sequence_length=spec.hidden_size, global_batch=1, precision=precision)
    one_by_one = Levers(cuda_graph="never")
    return build(workload, Layout(micro_batch=1), one_by_one, device, Implementations(), fill=small_values)


def _steps_ms(device: torch.device, program: Program) -> float:
    """Milliseconds of one step out of STEPS in a row."""
    return looped_ms(lambda: program.step(ignore), STEPS, device)


@torch.no_grad()
def small_values(model: torch.nn.Module) -> None:
    """Fill the parameters with values like those of a new model."""
    parameter: Tensor
    for parameter in model.parameters():
        parameter.fill_(1.0) if parameter.ndim < 2 else parameter.normal_(std=0.02)
