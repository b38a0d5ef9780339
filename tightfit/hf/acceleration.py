"""Put our kernels into one Hugging Face model, and take them out again."""

from collections.abc import Collection
from typing import Any, TypeVar

from torch import nn

from tightfit.errors import UserError
from tightfit.hf.families import block_of, require_supported
from tightfit.hf.replacement import PARTS, Part, Replaced, put
from tightfit.kernels.triton_support import IMPLS, Impl

Model = TypeVar("Model", bound=nn.Module)
RECORD = "_tightfit_replaced"
"""The one attribute an accelerated model has besides the replaced methods."""


def accelerate(model: Model, *, impl: Impl = "auto", parts: Collection[Part] = PARTS) -> Model:
    """The same model, computing with our kernels from now on; nothing happens to one that is accelerated already.

    `parts`: "norm", "rope" and "mlp" are faster; "loss" is computed without logits when labels are given. A model
    wrapped by PEFT is accelerated inside its wrapping.
    """
    inner = _inside_peft(model)
    require_supported(inner)
    _check(impl, parts)
    if RECORD not in vars(inner):
        found = [(module, block) for module in inner.modules() if (block := block_of(module)) is not None]
        chosen = [(module, block) for module, block in found if block.part in parts]
        replacements = [each for module, block in chosen for each in block.replacements(module, impl)]
        setattr(inner, RECORD, [put(each) for each in replacements])
    return model


def undo(model: Model) -> Model:
    """The same model with its own methods again and no trace of ours."""
    inner = _inside_peft(model)
    replaced: list[Replaced] = vars(inner).get(RECORD, [])
    while replaced:
        replaced[-1].put_back()
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
    if unknown or isinstance(parts, str):
        raise UserError(f"parts is {parts!r}; give a list of some of {', '.join(PARTS)}")
