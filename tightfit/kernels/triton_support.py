"""Triton where it is installed, a stand-in where it is not, and the rule that chooses between it and plain torch.

Kernels are in the file of their operation and import `triton` and `tl` from here, so that those files can be imported
without Triton (macOS, CPU-only installs), where only the plain implementations run. Importing this never touches a GPU.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.errors import UserError

__all__ = [
    "DTYPES",
    "HAS_TRITON",
    "IMPLS",
    "Impl",
    "at_most",
    "has_ptx",
    "is_interpreted",
    "tl",
    "triton",
    "use_triton",
]

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:

    class _NoTriton:
        """Enough of `triton` and `triton.language` for a file with kernels to be imported; none can be launched."""

        constexpr = object

        @staticmethod
        def jit(function: Any = None, **options: Any) -> Any:
            return function if function is not None else lambda decorated: decorated

    triton = tl = _NoTriton()
    HAS_TRITON = False

Impl = Literal["auto", "triton", "torch"]
_INTERPRETED = HAS_TRITON and bool(triton.knobs.runtime.interpret)  # TRITON_INTERPRET=1, read when kernels are made
IMPLS = ("auto", "triton", "torch")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the kernels' tensors; sums are float32. Others (float64) use plain torch."""


def use_triton(impl: Impl, tensor: Tensor) -> bool:
    """Whether an operation on `tensor` runs our kernel: on CUDA where Triton is, unless `impl` says otherwise."""
    if impl == "torch":
        return False
    if impl == "auto":
        return HAS_TRITON and tensor.is_cuda and tensor.dtype in DTYPES
    if impl != "triton":
        raise UserError(f"impl is {impl!r}; give one of {', '.join(IMPLS)}")
    if not HAS_TRITON:
        raise UserError("impl is 'triton', but Triton is not installed here; use impl='torch' or pip install triton")
    if tensor.dtype not in DTYPES:
        raise UserError(f"impl is 'triton', but the kernels take float32, bfloat16 or float16, not {tensor.dtype}")
    if not (tensor.is_cuda or is_interpreted() or isinstance(tensor, FakeTensor)):  # a fake one launches nothing
        raise UserError(f"impl is 'triton', but the tensor is on {tensor.device}; move it to a GPU or use impl='torch'")
    return True


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return _INTERPRETED


def has_ptx() -> bool:
    """Whether kernels may contain instructions of NVIDIA's cards."""
    return not is_interpreted() and not torch.version.hip


def at_most(registers: int | None) -> dict[str, int]:
    """The launch option that limits a kernel's threads to so many registers; AMD's compiler has none."""
    return {} if registers is None or torch.version.hip else {"maxnreg": registers}
