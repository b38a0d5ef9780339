"""Logits that are computed on first use.

An evaluation with labels mostly needs the loss alone, but sometimes the logits too (`compute_metrics` of the Trainer),
which is only known afterwards. So the fused path returns this tensor subclass, which has shape, dtype and device, and
computes its values at the first operation that needs them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

METADATA = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_sparse", "grad_fn")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.__repr__}


class LogitsOnDemand(Tensor):
    """A tensor of known shape whose values `make` computes on first use, without gradients."""

    _make: Callable[[], Tensor]
    _computed: Tensor | None

    @staticmethod
    def __new__(
        cls, make: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> "LogitsOnDemand":
        tensor: LogitsOnDemand = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        tensor._make, tensor._computed = make, None
        return tensor

    def values(self) -> Tensor:
        """The logits themselves."""
        if self._computed is None:
            with torch.no_grad():
                self._computed = self._make().to(self.dtype)
        return self._computed

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LogitsOnDemand(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.float:  # Accelerate does this to every output under mixed precision
            (logits,) = args
            return cls(lambda: logits.values().float(), tuple(logits.shape), torch.float32, logits.device)
        args, kwargs = tree_map_only(LogitsOnDemand, LogitsOnDemand.values, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(LogitsOnDemand, LogitsOnDemand.values, (args, kwargs or {}))
        return func(*args, **kwargs)
