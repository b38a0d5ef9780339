"""Rotary positions inside Hugging Face attention modules, without copying or patching their code.

An attention module's forward calls `apply_rotary_pos_emb`, a global of its modeling file. Replacing that global would
change every model in the process. Instead a function is made from the forward's code object with a copy of those
globals in which that one name is ours, and bound to the accelerated model's modules alone. The copy is made once: later
changes to the modeling file's globals are not seen.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Literal

from torch import Tensor, nn

from tightfit.hf.replacement import Method, Replacement
from tightfit.kernels.attention.rope import rope
from tightfit.kernels.triton_support import Impl

GLOBAL = "apply_rotary_pos_emb"


@dataclass(frozen=True)
class RotaryHandler:
    """An attention module that calls `apply_rotary_pos_emb(q, k, cos, sin)`."""

    part: Literal["rope"] = "rope"

    def replacements(self, module: nn.Module, impl: Impl) -> Iterator[Replacement]:
        forward = type(module).forward
        if isinstance(forward, FunctionType) and GLOBAL in forward.__code__.co_names:
            yield Replacement(module, "forward", _rebound(forward, impl))


@cache
def _rebound(forward: FunctionType, impl: Impl) -> Method:
    """`forward` with our `apply_rotary_pos_emb` among its globals."""
    names = {**forward.__globals__, GLOBAL: _apply_rotary(impl)}
    del names["__name__"]  # torch.compile would look names up in the module of this name, and find the original
    rebound = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    rebound.__kwdefaults__, rebound.__annotations__ = forward.__kwdefaults__, forward.__annotations__
    rebound.__module__, rebound.__qualname__, rebound.__doc__ = (
        forward.__module__,
        forward.__qualname__,
        forward.__doc__,
    )
    return rebound


@cache
def _apply_rotary(impl: Impl) -> Method:
    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, heads, T, D]; cos and sin [B or 1, T, d] hold each of their d/2 angles twice."""
        half = cos.shape[-1] // 2
        return rope(q, k, cos[..., :half].unsqueeze(unsqueeze_dim), sin[..., :half].unsqueeze(unsqueeze_dim), impl=impl)

    return apply_rotary_pos_emb
