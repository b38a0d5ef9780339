"""FileFormat: what every layout of quantized weights has to say.

A module is named as Hugging Face names it (`model.layers.0.mlp.up_proj`); its tensors are `module.suffix`. A format
says which suffixes a quantized module has, turns them into a CodedWeight and back, and writes and reads the
`quantization_config` of config.json, which says how the codes of each module are meant.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from tightfit.errors import UserError
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.described import Config, described_scheme
from tightfit.models.quantized.scheme import Scheme


class FileFormat(ABC):
    """One layout."""

    name: ClassVar[str]
    """As `quant_method` in config.json says it."""
    suffixes: ClassVar[tuple[str, ...]]
    """All that a quantized module may have instead of a plain `weight`."""
    marks: ClassVar[tuple[str, ...]]
    """Of these, those of which a quantized module has one and a plain one none."""

    @abstractmethod
    def refuse(self, scheme: Scheme) -> str | None:
        """Why it cannot hold codes of this scheme, or None if it can."""

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

    def check(self, schemes: Mapping[str, Scheme]) -> None:
        """Refuse schemes that this format cannot hold."""
        for module, scheme in schemes.items():
            if (why := self.refuse(scheme)) is not None:
                raise UserError(f"{module} is {scheme.describe()}, which the {self.name} format cannot hold: {why}")


def one_scheme(schemes: Mapping[str, Scheme], name: str) -> Scheme:
    """The scheme that all modules have, for formats that say it once."""
    different = sorted({scheme.describe() for scheme in schemes.values()})
    if len(different) != 1:
        raise UserError(
            f"layers are coded as {' and '.join(different)}, but {name} has one scheme for all; use compressed-tensors"
        )
    return next(iter(schemes.values()))


def stored(tensors: Mapping[str, Tensor], suffix: str, module: str) -> Tensor:
    """The tensor `suffix` of a module, which must be there."""
    if suffix not in tensors:
        raise UserError(f"{module} has no {suffix}, though its other tensors are there; download the model again")
    return tensors[suffix]
