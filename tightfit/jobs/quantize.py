"""Quantize: the section of a job that trains with rounded weights (quantization-aware training), without torch.

Forward passes use the decoder layers' weights rounded to the values of their codes; backward passes gradients through
the rounding unchanged (straight-through estimator, Bengio et al. 2013). Learned scales are trained as well (LSQ, Esser
et al. 2019). At its end the run writes a compressed model beside its checkpoints.
"""

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from tightfit.jobs.section import Section

SCALE_STATE_BYTES = 16
"""Bytes of a learned scale, its gradient and two moments, in float32."""


class Quantize(Section):
    bits: Literal[1, 2, 3, 4, 5, 6, 8] | None = None
    """Bits to which linear layers' weights are rounded; 1 is signs with a scale. Without, nothing is rounded."""
    group: int = Field(default=64, ge=8, le=1024)
    """Group size: neighbouring inputs that share a scale."""
    scales: Literal["minmax", "learned"] = "learned"
    """`learned` scales are symmetric and trained like weights (LSQ); `minmax` ones are computed from the weights."""
    outputs: Literal["plain", "int8"] = "plain"
    """`int8` also rounds linear layers' outputs, with a scale per token."""

    @model_validator(mode="after")
    def _needs_bits(self) -> Self:
        usual = {name: field.default for name, field in type(self).model_fields.items()}
        given = ", ".join(name for name, default in usual.items() if getattr(self, name) != default)
        if self.bits is None and given:
            raise ValueError(f"quantize has {given}, but no bits; set quantize.bits or drop the section")
        return self

    @property
    def rounding(self) -> "WeightRounding | None":
        """The rounding as a plan needs it; None where nothing is rounded."""
        if self.bits is None:
            return None
        return WeightRounding(bits=self.bits, group=self.group, learned=self.scales == "learned")


NOT_QUANTIZED = Quantize()


@dataclass(frozen=True, kw_only=True)
class WeightRounding:
    """Quantization-aware training as memory and time depend on it: rounded copies of weights, and learned scales."""

    bits: int
    group: int
    learned: bool

    @property
    def settings(self) -> Quantize:
        """The job section it comes from, without fields that take no memory."""
        return Quantize.model_validate(
            {"bits": self.bits, "group": self.group, "scales": "learned" if self.learned else "minmax"}
        )

    def scale_bytes(self, weights: int) -> int:
        """Bytes of the learned scales of `weights` weights, with gradients and moments."""
        return SCALE_STATE_BYTES * (weights // self.group) if self.learned else 0
