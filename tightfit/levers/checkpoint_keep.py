"""Selective activation checkpointing: results of chosen operations are saved in forward and not recomputed.

In forward a dispatch mode records the results of attention (with its logsumexp and random state) or matrix products;
during recomputation another mode replays these results in the same order instead of computing them. Autograd sits above
both modes and sees the same operations as without them, so gradients are bit for bit those of full recomputation.

Torch's selective checkpoint contexts work the same way, except for one thing: here, products are neither saved nor
recomputed where only the layer's output depends on them (kernels/recomputation.py). Torch's policy decides about one
operation at a time and cannot know that. A dispatch mode costs about ten microseconds of host time per operation, which
long sequences hide; where nothing is saved no mode is used.

Limits: attention made of several operations (eager, FlexAttention) is recomputed; matrix products are those of linear
layers. Results are replayed once: a second backward pass through the same graph recomputes them.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit.kernels.attention.flash_attention  # noqa: F401  registers the operator below
from tightfit.kernels.recomputation import is_left_out_when_recomputing, result_unwanted
from tightfit.levers.policy.recompute import KeepLevel

aten = torch.ops.aten
ATTENTION_NAMES = (
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "tightfit::flash_attention",
    "tightfit::ring_attention",
    "tightfit::simulated_attention",
)
PRODUCT_NAMES = ("aten::mm", "aten::addmm", "aten::_scaled_mm", "tightfit::fp8_matmul", "tightfit::grouped_matmul")
NAMES: dict[KeepLevel, frozenset[str]] = {
    "attention": frozenset(ATTENTION_NAMES),
    "matmuls": frozenset(ATTENTION_NAMES + PRODUCT_NAMES),
}
"""Operations whose results are saved, by level; other levels need no modes."""

Results = deque[tuple[Any, Any]]
"""(operation, result) pairs in order."""


class _RecordResults(TorchDispatchMode):
    """Records the results of the named operations; with `skips`, except those that recomputation skips."""

    def __init__(self, names: frozenset[str], results: Results, *, skips: bool) -> None:
        super().__init__()
        self.names, self.results, self.skips = names, results, skips
        self.ends_skipped = False
        """Whether the last named operation was not recorded, as recomputation skips it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in self.names:
            self.ends_skipped = self.skips and is_left_out_when_recomputing()
            if not self.ends_skipped:
                self.results.append((func, _detached(result)))
        return result


class _ReplayResults(TorchDispatchMode):
    """Returns recorded results instead of computing them."""

    def __init__(self, names: frozenset[str], results: Results) -> None:
        super().__init__()
        self.names, self.results = names, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name not in self.names or not self.results:
            return func(*args, **(kwargs or {}))
        recorded, result = self.results.popleft()
        assert recorded is func, f"recomputation calls {func} where forward called {recorded}"
        return result


def _detached(result: Any) -> Any:
    """The result's tensors, detached from autograd's graph (no copies)."""
    if isinstance(result, Tensor):
        return result.detach()
    return type(result)(_detached(part) for part in result) if isinstance(result, (tuple, list)) else result


class _Reenterable:
    """A context that can be entered once per backward pass through the same graph."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self.make, self.entered = make, ExitStack()

    def __enter__(self) -> None:
        self.entered.enter_context(self.make())

    def __exit__(self, *error: Any) -> None:
        self.entered.__exit__(*error)


class SelectiveCheckpoint:
    """The two contexts of one layer: `recording` around its forward, `replaying` around its recomputation."""

    def __init__(self, level: KeepLevel, *, skips_last: bool) -> None:
        self.names, self.skips_last, self.results = NAMES.get(level), skips_last, Results()

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The `context_fn` of `torch.utils.checkpoint`."""
        return self.recording() if self.names else nullcontext(), _Reenterable(self.replaying)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record results, except those of products that recomputation skips, including a plain matmul at the end."""
        assert self.names is not None
        with _RecordResults(self.names, self.results, skips=self.skips_last) as recorder:
            yield
        is_plain = self.skips_last and not recorder.ends_skipped
        if is_plain and self.results and self.results[-1][0]._schema.name in PRODUCT_NAMES:
            self.results.pop()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Replay results, and skip the last product where only the layer's output depends on it."""
        with ExitStack() as stack:
            if self.skips_last:
                stack.enter_context(result_unwanted())
            if self.names:
                stack.enter_context(_ReplayResults(self.names, self.results))
            yield
