"""Replaces one method of one module instance, and restores it.

A replacement is a plain function bound to its module as an instance attribute. Bound methods are copied with their
module: `copy.deepcopy` of an accelerated model (reference models, EMA) is an accelerated model of its own.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal, Protocol

from torch import nn

from tightfit.errors import UserError
from tightfit.kernels.triton_support import Impl

PartName = Literal["norm", "rope", "mlp", "loss"]
PARTS: tuple[PartName, ...] = ("norm", "rope", "mlp", "loss")
Method = Callable[..., Any]
"""A function whose first argument is the module it will be bound to."""


@dataclass(frozen=True)
class Replacement:
    """`method` in place of `module.name`."""

    module: nn.Module
    name: str
    method: Method


class Handler(Protocol):
    """How modules of one class are accelerated."""

    @property
    def part(self) -> PartName:
        """The name in `accelerate(parts=...)`."""

    def replacements(self, module: nn.Module, impl: Impl) -> Iterable[Replacement]:
        """The replacements for `module`; none where the kernels do not cover its configuration.

        Equal arguments give the same functions: modules bound to one function share one compiled graph.
        """


@dataclass(frozen=True)
class Replaced:
    """What `bind` changed, for `restore`."""

    replacement: Replacement
    attribute: str
    before: Any
    """The instance attribute before; None where there was only the class's."""

    def restore(self) -> None:
        """Leave the module as it was."""
        module = self.replacement.module
        if getattr(vars(module).get(self.attribute), "__func__", None) is not self.replacement.method:
            raise UserError(
                f"{type(module).__name__}.{self.attribute} was wrapped after accelerate(model), so it cannot be undone "
                "from below; unwrap it first, for example with accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
            )
        if self.before is None:
            delattr(module, self.attribute)
        else:
            setattr(module, self.attribute, self.before)


def bind(replacement: Replacement) -> Replaced:
    """Bind the method to its module."""
    module, attribute = replacement.module, _attribute(replacement)
    before = vars(module).get(attribute)
    setattr(module, attribute, MethodType(replacement.method, module))
    return Replaced(replacement, attribute, before)


def _attribute(replacement: Replacement) -> str:
    """The attribute to replace: with hooks of Hugging Face's Accelerate, a module's own forward is `_old_forward`."""
    hooked = replacement.name == "forward" and "_old_forward" in vars(replacement.module)
    return "_old_forward" if hooked else replacement.name
