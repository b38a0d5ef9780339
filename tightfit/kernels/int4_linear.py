"""int4_linear: x · Wᵀ with W in 4-bit codes on a CPU, by the product that torch has for them.

    w = (q − 8) · s + o        s and o in bfloat16, of each row and group of inputs; o = (8 − Z) · s

One token reads every weight once, so an eighth of the bytes is a fraction of the time. Inputs, s, o and results are
rounded to bfloat16, sums are float32, of each row by itself. On x86 with AVX2 or AVX-512; on Arm torch's product cuts
results off instead of rounding them, elsewhere it goes number by number, and codes are expanded. Torch orders codes as
the CPU's registers want them: `code_order` finds out how.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FAST = ("AVX2", "AVX512")
"""CPUs for which torch has a vector kernel that rounds."""
GROUPS = (32, 64, 128, 256)
STRIP_ROWS = 64
"""Rows that are whole blocks of any order: matrices of whole strips can be cut and joined between them."""
BLOCKS = (64, 32, 16)
MOST_ROWS = 256
"""Up to which the codes are read as they are: for more, expanding them first and multiplying in float32 is faster."""
MIDDLE = 8


class CodeOrder(NamedTuple):
    """Blocks of `block` rows, in each all rows' first code, all rows' second; two rows a byte, as `rows` says."""

    block: int
    rows: Tensor


@cache
def code_order() -> CodeOrder | None:
    """How torch orders codes on this CPU; None where its product is slow or the order another."""
    if torch.backends.cpu.get_cpu_capability() not in FAST:
        return None
    inputs = min(GROUPS)
    row = torch.arange(STRIP_ROWS)[:, None].expand(-1, inputs)
    column = torch.arange(inputs).expand(STRIP_ROWS, -1)
    found_row, found_column = (_nibbles(pack_int4(n & 15)) + 16 * _nibbles(pack_int4(n >> 4)) for n in (row, column))
    for block in BLOCKS:
        rows, columns = (found.view(-1, inputs, block) for found in (found_row, found_column))
        first = rows[0, 0]
        starts = torch.arange(0, STRIP_ROWS, block)[:, None, None]
        if bool((rows == starts + first).all()) and bool((columns == column[0, :, None]).all()):
            return CodeOrder(block, first)
    return None


def takes_int4(outputs: int, inputs: int, bits: int, group: int) -> bool:
    """Whether a CPU like this multiplies by such a matrix as it is packed."""
    fits = bits == 4 and group in GROUPS and inputs % group == 0 and outputs % STRIP_ROWS == 0
    return fits and code_order() is not None


def pack_int4(codes: Tensor) -> Tensor:
    """Codes [N, K] below 16 in the order of the product, bytes [N, K / 2]."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32).contiguous(), 1)
    return packed


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of `pack_int4` for matrices of whole strips."""
    order = code_order()
    assert order is not None, "what was packed then?"
    outputs, inputs = packed.shape[0], 2 * packed.shape[1]
    codes = packed.new_empty(outputs // order.block, order.block, inputs)
    codes[:, order.rows.long()] = _nibbles(packed).view(-1, inputs, order.block).transpose(1, 2)
    return codes.view(outputs, inputs)


def _nibbles(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten()


def int4_scales(scale: Tensor, zero: Tensor | None) -> Tensor:
    """Scales and zero points [N, groups] as the product takes them: s and o, bfloat16 [groups, N, 2]."""
    s = scale.to(torch.bfloat16)
    o = torch.zeros_like(s) if zero is None else ((MIDDLE - zero.float()) * scale.float()).to(torch.bfloat16)
    return torch.stack((s.T, o.T), dim=-1).contiguous()


def int4_linear(x: Tensor, packed: Tensor, scales: Tensor, group: int) -> Tensor:
    """x [..., K] times the transpose of the weight in `packed` [N, K / 2], in the dtype of x."""
    rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    made: Tensor = int4_product()(rows, packed, group, scales.contiguous())
    return made.to(x.dtype).view(*x.shape[:-1], -1)


def int4_linear_eager(x: Tensor, codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """The reference: what `int4_linear` rounds, rounded, and the rest in float32; codes [N, K] as they are."""
    s, o = scales.float().repeat_interleave(group, dim=0).unbind(-1)
    weight = (codes.float() - MIDDLE) * s.T + o.T
    return F.linear(x.to(torch.bfloat16).float(), weight).to(torch.bfloat16).to(x.dtype)


@cache
def int4_product() -> Any:
    """Torch's product of bfloat16 rows [M, K]: found once, as torch looks at every argument of a call that goes through
    `torch.ops`, which takes as long as a small norm."""
    return torch.ops.aten._weight_int4pack_mm_for_cpu.default._op
