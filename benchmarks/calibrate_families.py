"""What other families' layers are made of: windows and soft caps, wide heads, grouped products, LayerNorm and GELU.

Kernels alone, as in calibrate.py. And what the host needs to launch a layer of each family, from models so narrow that
the card waits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.calibrate_host import BACK, FEW, MORE, by_layer, narrow_program
from tightfit.kernels.attention.attention import AttentionMask, attention
from tightfit.kernels.experts.grouped_matmul import grouped_matmul, grouped_outer
from tightfit.kernels.experts.routed_mlp import combine, route
from tightfit.kernels.norm.layer_norm import layer_norm
from tightfit.models.presets import preset
from tightfit.models.spec import Experts, ModelSpec
from tightfit.prove.timing import timed_ms

CAP = 50.0
ATTENTION = (
    (64, 16, 16, 16, 1024, None, None),
    (96, 2, 32, 32, 4096, None, None),
    (256, 4, 8, 4, 2048, None, None),
    (256, 2, 8, 4, 8192, None, None),
    (256, 4, 8, 4, 2048, None, CAP),
    (256, 2, 8, 4, 8192, None, CAP),
    (256, 2, 8, 4, 8192, 4096, CAP),
    (256, 8, 4, 1, 2048, 512, None),
    (256, 2, 4, 1, 8192, 512, None),
    (256, 2, 8, 4, 8192, 1024, None),
    (128, 8, 32, 8, 2048, 1024, None),
    (128, 2, 32, 8, 8192, 1024, None),
    (128, 2, 32, 8, 8192, 4096, None),
)
"""Head size, rows, heads, key heads, tokens, window, soft cap."""
GROUPED = ((128, 65_536, 2048, 768), (128, 16_384, 2048, 768), (64, 65_536, 2048, 768), (8, 16_384, 4096, 14_336))
"""Experts, rows, inputs, outputs."""
FAMILIES = {
    "llama": "llama-3.2-1b",
    "qwen2": "qwen2.5-0.5b",
    "qwen3": "qwen3-0.6b",
    "gemma2": "gemma-2-2b",
    "gemma3": "gemma-3-1b",
    "gpt2": "gpt2",
    "mixtral": "mixtral-8x7b",
}


FAMILY_LEVERS = ("", "checkpoint_every=1", BACK)


@dataclass(frozen=True)
class Timed:
    """A kind of operation, its shape in words, milliseconds, and operations or bytes."""

    kind: str
    case: str
    ms: float
    tflop: float = 0.0
    gb: float = 0.0


def family_kernels(device: torch.device) -> Iterator[Timed]:
    """Every kernel; tiny shapes on a CPU."""
    on_gpu = device.type == "cuda"
    for head, rows, heads, kv_heads, length, window, cap in ATTENTION:
        shrink = 1 if on_gpu else 64
        seen = None if window is None else window // shrink
        yield from _attention(device, rows, length // shrink, (heads, kv_heads, head), seen, cap)
    for experts, rows, taken, made in GROUPED:
        shrink = 1 if on_gpu else 128
        yield from _grouped(device, max(2, experts // shrink), rows // shrink, taken // shrink, made // shrink)
    yield from _norms_and_gelu(device, 8192 if on_gpu else 64, 1600 if on_gpu else 32)


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).to(torch.bfloat16 if device.type == "cuda" else torch.float32)


def _attention(
    device: torch.device,
    rows: int,
    length: int,
    shape: tuple[int, int, int],
    window: int | None,
    cap: float | None,
) -> Iterator[Timed]:
    heads, kv_heads, head = shape
    tensors = [
        _random(device, rows, length, count, head).transpose(1, 2).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]
    query, key, value = tensors
    mask = AttentionMask(length, length, device, None)
    do = partial(attention, query, key, value, mask, scale=head**-0.5, window=window, softcap=cap)
    seen = min(window or length, length)
    pairs = rows * (seen * length - seen**2 / 2)
    work = 4e-12 * heads * head * pairs
    case = f"{rows}x{length} {heads}/{kv_heads}x{head}"
    case += f" window {window}" if window else ""
    case += " capped" if cap else ""
    with torch.no_grad():
        yield Timed("attention", f"forward {case}", timed_ms(do, device, graph=False), work)
    out = do()
    backward = partial(torch.autograd.grad, out, tensors, torch.ones_like(out), retain_graph=True)
    yield Timed("attention", f"backward {case}", timed_ms(backward, device, graph=False), 2.5 * work)


def _grouped(device: torch.device, experts: int, rows: int, taken: int, made: int) -> Iterator[Timed]:
    """The three grouped products of one expert matrix, and what routing adds: sorting, gathering, combining."""
    per_token = 8 if experts > 8 else 2
    tokens = rows // per_token
    chosen = torch.rand(tokens, experts, device=device).topk(per_token, dim=-1).indices
    routing = route(chosen, experts)
    x, copies = _random(device, tokens, taken), _random(device, rows, taken)
    weights, dy = _random(device, experts, made, taken), _random(device, rows, made)
    case, work = f"{experts} experts {rows}x{taken}x{made}", 2e-12 * rows * taken * made
    for name, do in (
        ("y", partial(grouped_matmul, copies, weights.mT, routing.offsets)),
        ("dx", partial(grouped_matmul, dy, weights, routing.offsets)),
        ("dW", partial(grouped_outer, dy, copies, routing.offsets)),
    ):
        yield Timed("grouped product", f"{name} {case}", timed_ms(do, device, graph=False), work)
    moved_gb = copies.nbytes / 1e9
    gather = partial(x.index_select, 0, routing.tokens)
    yield Timed("routing", f"sort {case}", timed_ms(partial(route, chosen, experts), device, graph=False))
    yield Timed("routing", f"gather {case}", timed_ms(gather, device, graph=False), gb=2 * moved_gb)
    add_up = partial(combine, copies, None, None, routing.rows)
    yield Timed("routing", f"combine {case}", timed_ms(add_up, device, graph=False), gb=moved_gb + x.nbytes / 1e9)


def _norms_and_gelu(device: torch.device, rows: int, width: int) -> Iterator[Timed]:
    x, wide = _random(device, rows, width).requires_grad_(), _random(device, rows, 4 * width).requires_grad_()
    weight, bias = (_random(device, width).requires_grad_() for _ in range(2))
    operations: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        f"layer norm {rows}x{width}": (partial(layer_norm, x, weight, bias, 1e-5), [x, weight, bias]),
        f"gelu {rows}x{4 * width}": (partial(F.gelu, wide, approximate="tanh"), [wide]),
        f"bias {rows}x{4 * width}": (lambda: wide.detach().sum(0), []),
    }
    for name, (do, leaves) in operations.items():
        gb = (x if name.startswith("layer norm") else wide).nbytes / 1e9
        with torch.no_grad():
            yield Timed("elementwise", f"forward {name}", timed_ms(do, device, graph=False), gb=2 * gb)
        if leaves:
            out = do()
            back = partial(torch.autograd.grad, out, leaves, torch.ones_like(out), retain_graph=True)
            yield Timed("elementwise", f"backward {name}", timed_ms(back, device, graph=False), gb=3 * gb)


def narrow_family(name: str, layers: int, size: int) -> ModelSpec:
    """A family's layers with few numbers of everything."""
    spec = preset(FAMILIES[name])
    experts = Experts(count=8, per_token=2, mlp_size=size) if spec.experts else None
    return replace(
        spec,
        layers=layers,
        hidden_size=size,
        heads=8,
        kv_heads=spec.kv_heads if spec.kv_heads == 1 else 8 if spec.family == "gpt2" else 4,
        head_dim=size // 4,
        mlp_size=2 * size,
        vocab_size=4 * size,
        window=None if spec.window is None else size // 2,
        window_layers=tuple(layer for layer in spec.window_layers if layer < layers),
        experts=experts,
    )


def family_launches(device: torch.device) -> Iterator[tuple[str, float]]:
    """Milliseconds of a layer by family, plain and recomputed."""
    size = 256 if device.type == "cuda" else 16
    programs = {
        (f"{family}{' ' + text if text else ''}", layers): narrow_program(
            narrow_family(family, layers, size), text, "bf16", device
        )
        for family in FAMILIES
        for text in FAMILY_LEVERS
        for layers in (FEW, MORE)
    }
    yield from by_layer(programs, device)
