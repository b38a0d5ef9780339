"""How an offloaded layer input is stored on the host: unchanged, or (lossy) in fp8.

fp8 is float8_e4m3fn with a scale per row (its largest magnitude maps to 448). Three mantissa bits: an element is off by
up to 1/16 of itself. It takes half of bf16's host memory and link traffic. The layer is then recomputed from a slightly
different input: gradients are those of a nearby point, the loss is unchanged. Rows are converted a chunk at a time, so
that no float32 copy of the whole tensor exists.
"""

from typing import Literal

import torch
from torch import Tensor

from tightfit.jobs.precision import FLOAT32_BYTES

Format = Literal["exact", "fp8"]
LARGEST = 448.0
ROWS_BYTES = 32 * 2**20


def stored(x: Tensor, form: Format) -> tuple[Tensor, ...]:
    """x [..., H] as stored on the host: x itself, or fp8 codes and a scale per row."""
    if form == "exact":
        return (x,)
    rows = x.reshape(-1, x.shape[-1])
    scales = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1, keepdim=True, dtype=torch.float32) / LARGEST
    scales.clamp_(min=torch.finfo(torch.float32).tiny)
    values = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=x.device)
    for part in _chunks(rows):
        values[part] = (rows[part].float() / scales[part]).to(torch.float8_e4m3fn)
    return values.view(torch.uint8), scales


def restored(parts: tuple[Tensor, ...], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The inverse of `stored`."""
    if len(parts) == 1:
        return parts[0]
    values, scales = parts[0].view(torch.float8_e4m3fn), parts[1]
    x = torch.empty(values.shape, dtype=dtype, device=values.device)
    for part in _chunks(x):
        x[part] = (values[part].float() * scales[part]).to(dtype)
    return x.view(shape)


def _chunks(rows: Tensor) -> list[slice]:
    step = max(1, ROWS_BYTES // (FLOAT32_BYTES * rows.shape[1]))
    return [slice(begin, begin + step) for begin in range(0, len(rows), step)]
