"""What a step of serving takes on a CPU, part by part, as `tightfit calibrate` and `tightfit bench serve` measure it.

A CPU has no one rate of products: one row is as fast as weights are read, a few are slower than that and far from the
peak, hundreds reach it. So products are kept as nanoseconds for each weight at several numbers of rows, by what weights
are read in.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

ReadAs = Literal["fp32", "fp16", "int4"]
"""What a product reads of a weight: itself, its copy in 16 bits, or a code of 4."""
Curve = tuple[tuple[int, float], ...]
"""Rows and nanoseconds for each weight, ascending."""

CALLS = ("layer_us", "operation_us", "step_us", "answer_us", "score_ns")
"""May be nothing."""


@dataclass(frozen=True, kw_only=True)
class CpuRates:
    """Measured parts of a step; plan/cpu_serving_time.py adds them up."""

    products: Mapping[ReadAs, Curve]
    """fp32 always; others where this CPU's torch multiplies by them."""
    layer_us: float
    """Of the calls of a plain layer with single tokens, beside what they compute."""
    operation_us: float
    """Of each operation of a layer that runs through its own modules (plan/cpu_operations.py)."""
    step_us: float
    """Of a step with one answer outside of its layers."""
    answer_us: float
    """Of each answer that gets a token: what is known of it, its choice."""
    logit_ns: float
    """Of each number that a choice looks at."""
    element_ns: float
    """Of each number that norms, rotary positions and activations read or write."""
    attention_gflop_s: float
    """Of the products of queries, keys and values of pieces of prompts."""
    score_ns: float
    """Of each score between those products: the softmax."""
    cached_gb_s: float
    """Keys and values that single tokens attend over."""

    def product_ns(self, read_as: ReadAs, rows: int) -> float:
        """For each weight: between measured numbers of rows on a line, beyond the last in proportion."""
        curve = self.products[read_as]
        if rows >= curve[-1][0]:
            return curve[-1][1] * rows / curve[-1][0]
        after = next(i for i, (at, _) in enumerate(curve) if at > rows)
        if after == 0:
            return curve[0][1]
        (low, low_ns), (high, high_ns) = curve[after - 1], curve[after]
        return low_ns + (high_ns - low_ns) * (rows - low) / (high - low)

    def nearest(self, read_as: ReadAs) -> ReadAs:
        """What this CPU reads where weights could be read so: themselves where it cannot."""
        return read_as if read_as in self.products else "fp32"

    @classmethod
    def is_whole(cls, data: Mapping[str, Any]) -> bool:
        """Whether `data` has all parts: fewer were measured before."""
        return data.keys() >= {each.name for each in fields(cls)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "CpuRates":
        """What `asdict` made; ValueError where a rate is no number."""
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
