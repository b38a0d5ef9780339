"""Selective checkpointing: results of chosen operations are kept until their layer is computed again, and not redone.

While a layer runs forward, a dispatch mode takes note of what attention (with its logsumexp and random state) or matrix
products return; while it is computed again, another hands these out in the same order instead of computing. Autograd
sits above both: it keeps and finds what it always does, so gradients are to the bit those of computing again.

Torch's own selective contexts work the same way. These differ in one thing: a layer's last product is neither kept nor
computed again where nothing is derived from it but the layer's output (kernels/recomputation.py), which torch's policy,
asked about one operation at a time, cannot tell. A mode costs some ten microseconds of host time per operation, which
long sequences hide; there is none where nothing is kept.

Limits: attention that is several operations (eager, FlexAttention) is computed again; matrix products are those of
linear layers. Kept results are handed out once: a second backward pass through the same graph computes them again.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit.kernels.flash_attention  # noqa: F401  registers the operator below
from tightfit.kernels.recomputation import result_unwanted
from tightfit.levers.policy.recompute import KeepLevel

aten = torch.ops.aten
ATTENTION_NAMES = (
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "tightfit::flash_attention",
    "tightfit::simulated_attention",
)
PRODUCT_NAMES = ("aten::mm", "aten::addmm", "aten::_scaled_mm", "tightfit::fp8_matmul")
NAMES: dict[KeepLevel, frozenset[str]] = {
    "attention": frozenset(ATTENTION_NAMES),
    "matmuls": frozenset(ATTENTION_NAMES + PRODUCT_NAMES),
}
"""Operations whose results are kept, by level; other levels need no modes."""

Results = deque[tuple[Any, Any]]
"""Operations and what they returned, in order."""


class _Noting(TorchDispatchMode):
    """Notes what the operations named return."""

    def __init__(self, names: frozenset[str], results: Results) -> None:
        super().__init__()
        self.names, self.results = names, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func._schema.name in self.names:
            self.results.append((func, _detached(made)))
        return made


class _Handing(TorchDispatchMode):
    """Hands out what was noted instead of computing it."""

    def __init__(self, names: frozenset[str], results: Results) -> None:
        super().__init__()
        self.names, self.results = names, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name not in self.names or not self.results:
            return func(*args, **(kwargs or {}))
        noted, made = self.results.popleft()
        assert noted is func, f"{func} is computed again where {noted} was"
        return made


def _detached(made: Any) -> Any:
    """Aliases that autograd has not seen; it will make the others part of its graph."""
    if isinstance(made, Tensor):
        return made.detach()
    return type(made)(_detached(part) for part in made) if isinstance(made, (tuple, list)) else made


class _Repeated:
    """A context that can be entered again, for each backward pass through the same graph."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self.make, self.entered = make, ExitStack()

    def __enter__(self) -> None:
        self.entered.enter_context(self.make())

    def __exit__(self, *error: Any) -> None:
        self.entered.__exit__(*error)


class Keeper:
    """The two contexts of one layer's pass: `noting` around its forward, `handing` around computing it again."""

    def __init__(self, level: KeepLevel, *, skips_last: bool) -> None:
        self.names, self.skips_last, self.results = NAMES.get(level), skips_last, Results()

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For `torch.utils.checkpoint`."""
        return self.noting() if self.names else nullcontext(), _Repeated(self.handing)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep results, but that of the last product where nobody will ask for it."""
        assert self.names is not None
        with _Noting(self.names, self.results):
            yield
        if self.skips_last and self.results and self.results[-1][0]._schema.name in PRODUCT_NAMES:
            self.results.pop()

    @contextmanager
    def handing(self) -> Iterator[None]:
        """Hand them out, and leave the layer's result undone where that is all the last operation is for."""
        with ExitStack() as stack:
            if self.skips_last:
                stack.enter_context(result_unwanted())
            if self.names:
                stack.enter_context(_Handing(self.names, self.results))
            yield
