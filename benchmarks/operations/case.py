"""What is measured: one operation on one set of inputs, done by several peers.

A peer is the forward function alone; the harness runs its backward pass, restores inputs that it may have overwritten,
times it and compares its results with the first peer's. Peers are optional installs: what cannot be imported raises
`AbsentError` when it is asked for, and is listed as such.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

Forward = Callable[..., Tensor | tuple[Tensor, ...]]
"""Inputs → results that have a gradient."""
MakePeer = Callable[[], Forward]
CPU_PEERS = ("eager", "torch", "tightfit")
"""What runs without a GPU; the rest needs one."""


class AbsentError(Exception):
    """A peer that cannot run here, with the reason."""


@dataclass(frozen=True)
class Where:
    """The device, and whether shapes shall be tiny (a check that everything runs, not a measurement)."""

    device: torch.device
    tiny: bool

    def size(self, full: int, tiny: int) -> int:
        """`full`, or `tiny` where shapes are tiny."""
        return tiny if self.tiny else full

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16, but float32 on CPUs, most of which emulate it."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        """A leaf of random numbers."""
        made = torch.randn(*shape, device=self.device, dtype=torch.float32) * scale
        return made.to(self.dtype).requires_grad_()


@dataclass(frozen=True)
class Case:
    """An operation on `inputs()`; those of them that require gradients get them.

    `work` is the least it must do: bytes read and written, or floating-point operations, as `bound_by` says.
    """

    operation: str
    shape: str
    inputs: Callable[[], tuple[Tensor, ...]]
    peers: dict[str, MakePeer]
    bound_by: Literal["copy", "gemm"]
    work: float


def ready(function: Forward) -> MakePeer:
    """A peer that needs no making."""
    return lambda: function


def compiled(function: Forward) -> MakePeer:
    """torch.compile of `function`, made anew, so that its first call compiles."""

    def make() -> Forward:
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    return make


def imported(module: str, name: str, package: str) -> Any:
    """`module.name`, or AbsentError with the package to install."""
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # peers fail to import in ways of their own (versions, compilers)
        raise AbsentError(f"{package} cannot be imported: {str(error).splitlines()[0]}") from error
