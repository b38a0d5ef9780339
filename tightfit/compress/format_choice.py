"""Which file layout a compressed model is written in, and how its modules are called there."""

from collections.abc import Mapping

from tightfit.compress.recipe import Recipe
from tightfit.errors import UserError
from tightfit.models.quantized.directory import shapes_of, written_links
from tightfit.models.quantized.formats.format import FileFormat
from tightfit.models.quantized.formats.gptq import Gptq
from tightfit.models.quantized.formats.registry import FORMATS
from tightfit.models.quantized.scheme import Scheme
from tightfit.models.spec import ModelSpec

PREFERRED = ("compressed-tensors", "bitsandbytes", "tightfit")


def choose_format(schemes: Mapping[str, Scheme], wanted: str | None, recipe: Recipe) -> FileFormat:
    """The layout the user wants, or the first that can hold all of these schemes."""
    reordered = any(step.method == "gptq" and step.act_order == "groups" for step in recipe.steps)
    if wanted is not None and wanted not in FORMATS:
        raise UserError(f"format {wanted!r} is unknown; use one of {', '.join(FORMATS)}")
    names = (wanted,) if wanted is not None else ("gptq",) if reordered else PREFERRED
    for name in names:
        form = Gptq(reordered=reordered) if name == "gptq" else FORMATS[name]()
        if wanted is not None or all(form.refuse(scheme) is None for scheme in schemes.values()):
            form.check(schemes)
            return form
    told = " and ".join(sorted({scheme.describe() for scheme in schemes.values()}))
    raise UserError(f"no file format holds {told} together; use one kind of numbers for all layers")


def module_schemes(spec: ModelSpec, schemes: Mapping[str, Scheme]) -> tuple[dict[str, Scheme], list[str]]:
    """Schemes by Hugging Face's module names, and the linear modules of layers that stay plain."""
    made: dict[str, Scheme] = {}
    plain: list[str] = []
    shapes = shapes_of(spec)
    for link in written_links(spec, shapes):
        module = link.theirs.removesuffix(".weight")
        ours = link.ours[0].removesuffix(".weight")
        if ours in schemes:
            made[module] = schemes[ours]
        elif link.theirs.endswith(".weight") and ours.startswith("layers.") and len(shapes[link.ours[0]].shape) > 1:
            plain.append(module)
    return made, plain
