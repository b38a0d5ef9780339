"""Replaces methods of one Hugging Face model by our kernels, and undoes it."""

from collections.abc import Collection
from typing import Any, TypeVar

from torch import nn

from tightfit.errors import UserError
from tightfit.hf.families import handler_of, require_supported
from tightfit.hf.replacement import PARTS, PartName, Replaced, bind
from tightfit.kernels.triton_support import IMPLS, Impl

Model = TypeVar("Model", bound=nn.Module)
RECORD = "_tightfit_replaced"
"""The one attribute that an accelerated model has besides the replaced methods: the `Replaced`, for `undo`."""


def accelerate(model: Model, *, impl: Impl = "auto", parts: Collection[PartName] = PARTS) -> Model:
    """The same model, with our kernels from now on; calling it twice changes nothing.

    `parts`: "norm", "rope" and "mlp" run faster; "loss" is computed without logits when labels are given. A PEFT model
    is accelerated inside its wrapper.
    """
    inner = _inside_peft(model)
    require_supported(inner)
    _check(impl, parts)
    if RECORD not in vars(inner):
        found = [(module, handler) for module in inner.modules() if (handler := handler_of(module)) is not None]
        chosen = [(module, handler) for module, handler in found if handler.part in parts]
        replacements = [each for module, handler in chosen for each in handler.replacements(module, impl)]
        setattr(inner, RECORD, [bind(each) for each in replacements])
    return model


def undo(model: Model) -> Model:
    """The same model with its own methods again."""
    inner = _inside_peft(model)
    replaced: list[Replaced] = vars(inner).get(RECORD, [])
    while replaced:
        replaced[-1].restore()
        replaced.pop()
    vars(inner).pop(RECORD, None)
    return model


def _inside_peft(model: nn.Module) -> nn.Module:
    """The transformers model of a PeftModel; any other model as it is."""
    inside: Any = getattr(model, "get_base_model", None)
    return model if inside is None else inside()


def _check(impl: str, parts: Collection[str]) -> None:
    if impl not in IMPLS:
        raise UserError(f"impl is {impl!r}; give one of {', '.join(IMPLS)}")
    unknown = [part for part in parts if part not in PARTS]
    if unknown or isinstance(parts, str) or not parts:
        raise UserError(f"parts is {parts!r}; give a list of some of {', '.join(PARTS)}")
