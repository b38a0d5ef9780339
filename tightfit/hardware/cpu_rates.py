"""Times of the parts of a serving step on a CPU, as `tightfit calibrate` and `tightfit bench serve` measure them.

A CPU has no single rate of products: with one row they are as fast as weights are read, with a few rows slower than
that and far from the peak, with hundreds they reach the peak. So products are stored as nanoseconds per weight at
several numbers of rows, for each format in which weights are read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

ReadAs = Literal["fp32", "fp16", "int4"]
"""Format in which a product reads weights: float32, a 16-bit copy, or 4-bit codes."""
Curve = tuple[tuple[int, float], ...]
"""(rows, nanoseconds per weight), ascending."""

CALLS = ("layer_us", "operation_us", "step_us", "answer_us", "score_ns")
"""Times that may be 0; the others must be above."""


@dataclass(frozen=True, kw_only=True)
class CpuRates:
    """Measured parts of a step; plan/serving/cpu_seconds.py adds them up."""

    products: Mapping[ReadAs, Curve]
    """fp32 always; other formats where this CPU's torch has products with them."""
    layer_us: float
    """Call overhead of a plain layer's operations in a decode step."""
    operation_us: float
    """Call overhead of each operation in a layer that runs through its own modules (plan/serving/cpu_operations.py)."""
    step_us: float
    """A step with one answer, outside its layers."""
    answer_us: float
    """Each further answer, a sequence that samples a token: its bookkeeping and sampling."""
    logit_ns: float
    """Each logit that sampling reads."""
    element_ns: float
    """Each number that norms, rope and activations read or write."""
    attention_gflop_s: float
    """Rate of attention's two products in prefill."""
    score_ns: float
    """The softmax, per score in prefill."""
    cached_gb_s: float
    """Rate at which decode reads keys and values from the cache."""

    def product_ns(self, read_as: ReadAs, rows: int) -> float:
        """Nanoseconds per weight: interpolated between measured numbers of rows, proportional beyond the last."""
        curve = self.products[read_as]
        if rows >= curve[-1][0]:
            return curve[-1][1] * rows / curve[-1][0]
        after = next(i for i, (at, _) in enumerate(curve) if at > rows)
        if after == 0:
            return curve[0][1]
        (low, low_ns), (high, high_ns) = curve[after - 1], curve[after]
        return low_ns + (high_ns - low_ns) * (rows - low) / (high - low)

    def nearest(self, read_as: ReadAs) -> ReadAs:
        """`read_as` if this CPU has products with that format, else fp32."""
        return read_as if read_as in self.products else "fp32"

    @classmethod
    def is_whole(cls, data: Mapping[str, Any]) -> bool:
        """Whether `data` has all parts; older calibrations have fewer."""
        return data.keys() >= {each.name for each in fields(cls)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "CpuRates":
        """The rates from `asdict`'s data; ValueError where a rate is no number."""
        curves = {name: tuple((int(rows), float(ns)) for rows, ns in curve) for name, curve in data["products"].items()}
        found = cls(**{**data, "products": curves})
        found._check()
        return found

    def _check(self) -> None:
        if "fp32" not in self.products or not all(self.products.values()):
            raise ValueError("products of float32 are missing")
        rates = {f"products {name} {rows}": ns for name, curve in self.products.items() for rows, ns in curve}
        rates |= {each.name: getattr(self, each.name) for each in fields(self) if each.name != "products"}
        for name, rate in rates.items():
            least = 0.0 if name in CALLS else math.ulp(0.0)
            if type(rate) not in (int, float) or not least <= rate < math.inf:
                raise ValueError(f"{name} is {rate!r}")
        for name, curve in self.products.items():
            rows = [each for each, _ in curve]
            if rows != sorted({*rows}) or rows[0] < 1:
                raise ValueError(f"rows of {name} are {rows}")
