"""How the input of a layer is stored while it waits on the host: as it is, or (lossy) in 8 bits.

fp8 is float8_e4m3fn, each row of hidden size scaled by its largest magnitude to 448: three bits of mantissa, so an
element is off by up to 1/16 of itself. Half of what bf16 takes of host memory and of the link. A layer is then computed
again from an input that is not quite the one it had: gradients are those of a nearby point, losses are untouched.
Rows are converted some at a time in float32, so that no copy of everything exists beside the two.
"""

from typing import Literal

import torch
from torch import Tensor

Format = Literal["exact", "fp8"]
LARGEST = 448.0
ROWS_BYTES = 32 * 2**20
WIDE = 4


def stored(x: Tensor, form: Format) -> tuple[Tensor, ...]:
    """The tensors that stand for x [..., H] on the host: x itself, or bytes and a scale per row."""
    if form == "exact":
        return (x,)
    rows = x.reshape(-1, x.shape[-1])
    scales = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1, keepdim=True, dtype=torch.float32) / LARGEST
    scales.clamp_(min=torch.finfo(torch.float32).tiny)
    values = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=x.device)
    for part in _parts(rows):
        values[part] = (rows[part].float() / scales[part]).to(torch.float8_e4m3fn)
    return values.view(torch.uint8), scales


def restored(parts: tuple[Tensor, ...], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """x from what stands for it, on the device that is on."""
    if len(parts) == 1:
        return parts[0]
    values, scales = parts[0].view(torch.float8_e4m3fn), parts[1]
    x = torch.empty(values.shape, dtype=dtype, device=values.device)
    for part in _parts(x):
        x[part] = (values[part].float() * scales[part]).to(dtype)
    return x.view(shape)


def _parts(rows: Tensor) -> list[slice]:
    step = max(1, ROWS_BYTES // (WIDE * rows.shape[1]))
    return [slice(begin, begin + step) for begin in range(0, len(rows), step)]
