"""The torch dtype of each precision name of a job, and which of them keep float32 master weights."""

import torch

from tightfit.jobs.precision import PrecisionName

COMPUTE_DTYPES: dict[PrecisionName, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "pure-bf16": torch.bfloat16,
}


def keeps_master_weights(precision: PrecisionName) -> bool:
    """Whether the optimizer updates float32 master weights (mixed precision)."""
    return precision in ("bf16", "fp16")
