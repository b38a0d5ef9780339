"""The names of precisions: what weights are computed in, and whether float32 master weights are kept beside them."""

from typing import Literal

PrecisionName = Literal["fp32", "bf16", "fp16", "pure-bf16"]
Precision = Literal["auto", "fp32", "bf16", "fp16", "pure-bf16"]
