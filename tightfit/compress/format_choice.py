"""Which file layout a compressed model is written in."""

from collections.abc import Mapping

from tightfit.compress.recipe import Recipe
from tightfit.errors import UserError
from tightfit.models.quantized.formats.format import FileFormat
from tightfit.models.quantized.formats.gptq import Gptq
from tightfit.models.quantized.formats.registry import FORMATS
from tightfit.models.quantized.scheme import Scheme

PREFERRED = ("compressed-tensors", "bitsandbytes", "tightfit")


def choose_format(schemes: Mapping[str, Scheme], wanted: str | None, recipe: Recipe) -> FileFormat:
    """The layout the user wants, or the first that can hold all of these schemes."""
    reordered = any(_is_reordered(recipe, module, scheme) for module, scheme in schemes.items())
    if wanted is not None and wanted not in FORMATS:
        raise UserError(f"format {wanted!r} is unknown; use one of {', '.join(FORMATS)}")
    if wanted not in (None, "gptq") and reordered:
        raise UserError(f"{wanted} has no groups out of order; use act_order: static, or the gptq format")
    names = (wanted,) if wanted is not None else ("gptq",) if reordered else PREFERRED
    for name in names:
        form = Gptq(reordered=reordered) if name == "gptq" else FORMATS[name]()
        if wanted is not None or all(form.refuse(scheme) is None for scheme in schemes.values()):
            form.check(schemes)
            return form.arranged_for(schemes.values())
    told = " and ".join(sorted({scheme.describe() for scheme in schemes.values()}))
    raise UserError(f"no file format holds {told} together; use one kind of numbers for all layers")


def _is_reordered(recipe: Recipe, module: str, scheme: Scheme) -> bool:
    """Whether the recipe puts this module's inputs into groups out of order."""
    step = recipe.coding(module)
    return step is not None and step.method == "gptq" and step.act_order == "groups" and scheme.group > 0
