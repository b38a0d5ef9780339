"""Quantize: the section of a job that trains with rounded weights (quantization-aware training), without torch.

Forward passes use the weights of decoder layers as their codes will hold them; gradients pass the rounding as if it
were not there (straight-through, Bengio et al. 2013). With learned scales the scales are trained too (LSQ, Esser et al.
2019). At the end the run holds a compressed model beside its checkpoints.
"""

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from tightfit.jobs.section import Section

SCALE_STATE_BYTES = 16
"""A learned scale, its gradient and two moments, in float32."""


class Quantize(Section):
    bits: Literal[1, 2, 3, 4, 5, 6, 8] | None = None
    """Width that weights of linear layers are trained for; 1 is signs with a scale. Without, nothing is rounded."""
    group: int = Field(default=64, ge=8, le=1024)
    """Neighbouring inputs that share a scale."""
    scales: Literal["minmax", "learned"] = "learned"
    """`learned` scales are trained like weights (LSQ) and symmetric; `minmax` ones follow the weights."""
    outputs: Literal["plain", "int8"] = "plain"
    """`int8` also rounds what linear layers give, a scale per token."""

    @model_validator(mode="after")
    def _needs_bits(self) -> Self:
        usual = {name: field.default for name, field in type(self).model_fields.items()}
        given = ", ".join(name for name, default in usual.items() if getattr(self, name) != default)
        if self.bits is None and given:
            raise ValueError(f"quantize has {given}, but no bits; set quantize.bits or drop the section")
        return self

    @property
    def rounding(self) -> "WeightRounding | None":
        """What a plan has to know of it."""
        if self.bits is None:
            return None
        return WeightRounding(bits=self.bits, group=self.group, learned=self.scales == "learned")


NOT_QUANTIZED = Quantize()


@dataclass(frozen=True, kw_only=True)
class WeightRounding:
    """Rounded weights in memory: a copy of every layer's from forward to backward, and scales that are trained."""

    bits: int
    group: int
    learned: bool

    @property
    def settings(self) -> Quantize:
        """The section it comes from, but for what takes no memory."""
        return Quantize.model_validate(
            {"bits": self.bits, "group": self.group, "scales": "learned" if self.learned else "minmax"}
        )

    def scale_bytes(self, weights: int) -> int:
        """Learned scales of so many weights with all that training keeps of them."""
        return SCALE_STATE_BYTES * (weights // self.group) if self.learned else 0
