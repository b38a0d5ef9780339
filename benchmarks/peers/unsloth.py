"""Unsloth's kernels as peers, imported without what `import unsloth` does to the process.

That import replaces functions of torch, transformers and others, refuses to run without an accelerator and wants a
dozen packages (trl, peft, bitsandbytes, …). The kernels themselves need torch, triton, transformers and unsloth_zoo. So
empty packages stand for those whose `__init__` does the rest (SHELLS), and only the modules with kernels are loaded.
They stay for the life of the process, as the kernels' modules import each other later too: `import unsloth` finds an
empty package then. Where it has been imported before, it is taken as it is.

Its gated activations come without autograd; their backward kernel also makes the product again (for adapters), a pass
more than the others make. Its LayerNorm is left out: that module patches transformers when imported.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.operations.case import AbsentError, Forward, imported
from tightfit.models.spec import Activation

SHELLS = ("unsloth", "unsloth.kernels", "unsloth_zoo", "unsloth_zoo.temporary_patches")
GLU = {
    "silu": ("swiglu", "swiglu_fg_kernel", "swiglu_DWf_DW_dfg_kernel"),
    "gelu_tanh": ("geglu", "geglu_approx_forward_kernel", "geglu_approx_backward_kernel"),
}
"""Activation → module, forward and backward of its gated form."""


def unsloth_rms_norm(eps: float) -> Forward:
    """x, weight → y."""
    norm = _kernel("unsloth.kernels.rms_layernorm", "fast_rms_layernorm")
    return lambda x, w: norm(SimpleNamespace(weight=w, variance_epsilon=eps), x)


def unsloth_rope(cos: Tensor, sin: Tensor) -> Forward:
    """q, k [B, heads, T, D] → turned ones, by tables [T, D]."""
    turn = _kernel("unsloth.kernels.rope_embedding", "fast_rope_embedding")
    return lambda q, k: turn(q, k, cos, sin)


def unsloth_cross_entropy(labels: Tensor) -> Forward:
    """Logits [N, V] → mean loss."""
    loss = _kernel("unsloth.kernels.cross_entropy_loss", "fast_cross_entropy_loss")
    return lambda logits: loss(logits[None], labels[None])


def unsloth_linear_cross_entropy(labels: Tensor) -> Forward:
    """Hidden states [N, H] and weight [V, H] → mean loss."""
    loss = _kernel("unsloth_zoo.fused_losses.fused_linear", "fused_linear_cross_entropy")
    return lambda hidden, weight: loss(hidden, weight, None, labels, divisor=len(labels))


def unsloth_glu(activation: Activation) -> Forward:
    """gate, up [N, W] → act(gate) · up; backward writes over both and over the gradient it is given."""
    if activation not in GLU:
        raise AbsentError("Unsloth has no such operation")
    module, forward, backward = GLU[activation]
    kernels = [_kernel(f"unsloth.kernels.{module}", name) for name in (forward, backward)]
    return lambda gate, up: _Glu.apply(gate.view_as(gate), up.view_as(up), *kernels)


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, forward: Callable[..., Tensor], backward: Any) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernel = backward
        return forward(gate[None], up[None])[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, d_up, d_gate = ctx.kernel(grads[0], *ctx.saved_tensors)
        return d_gate, d_up, None, None


def _kernel(module: str, name: str) -> Any:
    _put_shells()
    return imported(module, name, "unsloth")


def _put_shells() -> None:
    """Empty packages in the places of SHELLS, each able to find its own modules."""
    if "unsloth" in sys.modules:
        return
    for package in ("unsloth", "unsloth_zoo"):
        if find_spec(package) is None:
            raise AbsentError(f"{package} is not installed")
    for name in SHELLS:
        parent, _, tail = name.rpartition(".")
        shell = ModuleType(name)
        shell.__path__ = _folders(name) if not parent else [str(Path(p) / tail) for p in sys.modules[parent].__path__]
        sys.modules[name] = shell
        if parent:
            setattr(sys.modules[parent], tail, shell)
    sys.modules["unsloth_zoo"].DEVICE_TYPE = "cuda"  # type: ignore[attr-defined]


def _folders(package: str) -> list[str]:
    spec = find_spec(package)
    assert spec is not None
    return list(spec.submodule_search_locations or [])
