"""One method of one module of one model, replaced; and put back.

A replacement is a plain function bound to its module as an instance attribute. Bound methods follow their module:
`copy.deepcopy` of an accelerated model (reference models, EMA) is an accelerated model of its own.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal, Protocol

from torch import nn

from tightfit.errors import UserError
from tightfit.kernels.triton_support import Impl

Part = Literal["norm", "rope", "mlp", "loss"]
PARTS: tuple[Part, ...] = ("norm", "rope", "mlp", "loss")
Method = Callable[..., Any]
"""A function whose first argument is the module it will be bound to."""


@dataclass(frozen=True)
class Replacement:
    """`method` in place of `module.name`."""

    module: nn.Module
    name: str
    method: Method


class Block(Protocol):
    """What a table row says about one class of modules."""

    @property
    def part(self) -> Part:
        """What the user switches it on and off by."""

    def replacements(self, module: nn.Module, impl: Impl) -> Iterable[Replacement]:
        """None where this module is set up in a way the kernels do not cover.

        Equal arguments give the same functions: modules bound to one function share one compiled graph.
        """


@dataclass(frozen=True)
class Replaced:
    """What `put` changed, so that it can be put back."""

    replacement: Replacement
    slot: str
    before: Any
    """What the instance held under `slot`; None when it held nothing and its class answered."""

    def put_back(self) -> None:
        """Leave the module as it was."""
        module = self.replacement.module
        if getattr(vars(module).get(self.slot), "__func__", None) is not self.replacement.method:
            raise UserError(
                f"{type(module).__name__}.{self.slot} was wrapped after accelerate(model), so it cannot be undone from "
                "below; unwrap it first, for example with accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
            )
        if self.before is None:
            delattr(module, self.slot)
        else:
            setattr(module, self.slot, self.before)


def put(replacement: Replacement) -> Replaced:
    """Bind the method to its module."""
    module, slot = replacement.module, _slot(replacement)
    before = vars(module).get(slot)
    setattr(module, slot, MethodType(replacement.method, module))
    return Replaced(replacement, slot, before)


def _slot(replacement: Replacement) -> str:
    """Where the method is looked up: under the hooks of Hugging Face's Accelerate, a module keeps its forward aside."""
    hooked = replacement.name == "forward" and "_old_forward" in vars(replacement.module)
    return "_old_forward" if hooked else replacement.name
