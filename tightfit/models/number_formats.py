"""Number formats by the names that jobs give them: what a model computes in, and whether float32 stands behind it."""

import torch

from tightfit.jobs.job import PrecisionName

COMPUTE_DTYPES: dict[PrecisionName, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "pure-bf16": torch.bfloat16,
}


def keeps_master_weights(precision: PrecisionName) -> bool:
    """Whether float32 copies of the weights are what the optimizer updates."""
    return precision in ("bf16", "fp16")
