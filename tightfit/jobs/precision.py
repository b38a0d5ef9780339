"""Precisions by name: what weights are computed in, and whether float32 master weights are kept beside them."""

from typing import Literal

PrecisionName = Literal["fp32", "bf16", "fp16", "pure-bf16"]
Precision = Literal["auto", "fp32", "bf16", "fp16", "pure-bf16"]

FLOAT32_BYTES, INT64_BYTES, INT32_BYTES = 4, 8, 4
"""Bytes of a number in any precision: masters, sums and statistics are float32, tokens and indices int64."""
