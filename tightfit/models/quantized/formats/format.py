"""FileFormat: the interface of every layout of quantized weights in files.

A module is named as Hugging Face names it (`model.layers.0.mlp.up_proj`); its tensors are `module.suffix`. A format
says which suffixes a quantized module has, turns them into a CodedWeight and back, and writes and reads the
`quantization_config` of config.json, which says in which scheme each module is coded.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.described import Config, described_scheme
from tightfit.models.quantized.scheme import Scheme

AGAIN = "download the model again"
WORDS = (torch.int32,)
SIZES = (torch.int32, torch.int64)
NUMBERS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class FileFormat(ABC):
    """How one library lays out compressed weights in files."""

    name: ClassVar[str]
    """The `quant_method` in config.json."""
    suffixes: ClassVar[tuple[str, ...]]
    """Suffixes of all tensors that a quantized module may have instead of a plain `weight`."""
    marks: ClassVar[tuple[str, ...]]
    """Suffixes by which quantized modules are found: each has one of them, a plain module has none."""
    dtypes: ClassVar[Mapping[str, tuple[torch.dtype, ...]]]
    """Dtypes in which tensors may be stored, by suffix; others are refused, as they would be misread."""

    @abstractmethod
    def refuse(self, scheme: Scheme) -> str | None:
        """Why it cannot hold codes of this scheme, or None if it can."""

    def arranged_for(self, schemes: Iterable[Scheme]) -> "FileFormat":
        """This layout as it holds codes of all these schemes in one directory."""
        return self

    def transformers_limit(self, schemes: Mapping[str, Scheme], plain: Iterable[str]) -> str:
        """Why transformers does not load these quantized and these `plain` modules from it; empty where nothing is
        known against it."""
        return ""

    def refuse_module(self, module: str) -> str | None:
        """Why it cannot hold this module, however that is coded, or None if it can."""
        return None

    def refuse_shape(self, outputs: int, inputs: int, scheme: Scheme) -> str | None:
        """Why it cannot hold a matrix of this shape, coded so, or None if it can."""
        return None

    @abstractmethod
    def encode(self, weight: CodedWeight) -> dict[str, Tensor]:
        """The tensors of a module, by suffix."""

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme, module: str) -> CodedWeight:
        """The weight in these tensors."""

    @abstractmethod
    def config(self, schemes: Mapping[str, Scheme], plain: Iterable[str]) -> dict[str, Any]:
        """The quantization_config of a model with these quantized and these `plain` linear modules."""

    def scheme(self, config: Config, module: str) -> Scheme:
        """How the quantized `module` is coded, by a quantization_config."""
        return described_scheme(self.name, config, module)

    def read(self, tensors: Mapping[str, Tensor], scheme: Scheme, module: str) -> CodedWeight:
        """`decode` of tensors from a file, which may be damaged: that is a UserError."""
        for suffix, tensor in tensors.items():
            if tensor.dtype not in self.dtypes.get(suffix, (tensor.dtype,)):
                raise UserError(f"{suffix} of {module} is stored as {tensor.dtype}, which is not read; {AGAIN}")
        try:
            weight = self.decode(tensors, scheme, module)
        except UserError:
            raise
        except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"the tensors of {module} do not make up a {scheme.describe()} matrix ({why}); {AGAIN}"
            ) from error
        if weight.codes.ndim != 2 or weight.scale.ndim != 2:
            told = f"codes of shape {list(weight.codes.shape)} and scales of shape {list(weight.scale.shape)}"
            raise UserError(f"{module} has {told}, which make no matrix; {AGAIN}")
        if not bool(weight.scale.isfinite().all()):
            raise UserError(f"{module} has scales that are no numbers; {AGAIN}")
        if weight.zero is not None and weight.zero.shape != weight.scale.shape:
            told = f"{list(weight.zero.shape)} zero points and {list(weight.scale.shape)} scales"
            raise UserError(f"{module} has {told}; {AGAIN}")
        return weight

    def check(self, schemes: Mapping[str, Scheme]) -> None:
        """Refuse schemes that this format cannot hold."""
        for module, scheme in schemes.items():
            if (why := self.refuse(scheme) or self.refuse_module(module)) is not None:
                raise UserError(f"{module} is {scheme.describe()}, which the {self.name} format cannot hold: {why}")

    def check_shapes(self, schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, int]]) -> None:
        """Refuse modules whose matrices [outputs, inputs] this format cannot hold."""
        for module, scheme in schemes.items():
            if (why := self.refuse_shape(*shapes[module], scheme)) is not None:
                raise UserError(f"{module} cannot be written in the {self.name} format: {why}")


def one_scheme(schemes: Mapping[str, Scheme], name: str) -> Scheme:
    """The scheme that all modules share, for formats that have one for a whole model."""
    different = sorted({scheme.describe() for scheme in schemes.values()})
    if len(different) != 1:
        raise UserError(
            f"layers are coded as {' and '.join(different)}, but {name} has one scheme for all; use compressed-tensors"
        )
    return next(iter(schemes.values()))


def stored(tensors: Mapping[str, Tensor], suffix: str, module: str) -> Tensor:
    """The tensor `suffix` of a module, which must be there."""
    if suffix not in tensors:
        raise UserError(f"{module} has no {suffix}, though its other tensors are there; {AGAIN}")
    return tensors[suffix]
