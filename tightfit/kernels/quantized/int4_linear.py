"""int4_linear: x · Wᵀ with W in 4-bit codes on a CPU, by torch's own int4 kernel.

    w = (q − 8) · s + o        s and o in bfloat16, of each row and group of inputs; o = (8 − Z) · s

For one token time goes to reading every weight once, here an eighth of float32's bytes. Inputs, s, o and results are
rounded to bfloat16, sums are float32, and a row's result does not depend on the other rows. On x86 with AVX2 or
AVX-512; on Arm torch's kernel truncates results instead of rounding them, elsewhere it is not vectorized, and there
codes are expanded instead. Torch permutes codes to suit the CPU's registers: `code_order` finds out how.
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
"""Rows that are whole blocks in every order: matrices of whole strips can be cut and joined between strips."""
BLOCKS = (64, 32, 16)
MOST_ROWS = 256
"""Rows of x up to which packed codes are multiplied; for more, expanding them and multiplying in float32 is faster."""
MIDDLE = 8


class CodeOrder(NamedTuple):
    """Torch's order: per block of `block` rows all rows' first code, then all rows' second, two codes a byte, with the
    rows in the order `rows`."""

    block: int
    rows: Tensor


@cache
def code_order() -> CodeOrder | None:
    """How torch orders codes on this CPU; None where its kernel is slow or the order is no known one."""
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
    """Whether this CPU multiplies by such a matrix without expanding it."""
    fits = bits == 4 and group in GROUPS and inputs % group == 0 and outputs % STRIP_ROWS == 0
    return fits and code_order() is not None


def pack_int4(codes: Tensor) -> Tensor:
    """Codes [N, K] below 16 in the order that torch's kernel reads, bytes [N, K / 2]."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32).contiguous(), 1)
    return packed


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of `pack_int4` for matrices of whole strips."""
    order = code_order()
    assert order is not None, "this CPU has no known order of int4 codes"
    outputs, inputs = packed.shape[0], 2 * packed.shape[1]
    codes = packed.new_empty(outputs // order.block, order.block, inputs)
    codes[:, order.rows.long()] = _nibbles(packed).view(-1, inputs, order.block).transpose(1, 2)
    return codes.view(outputs, inputs)


def _nibbles(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten()


def int4_scales(scale: Tensor, zero: Tensor | None) -> Tensor:
    """Scales and zero points [N, groups] as torch's kernel takes them: s and o, bfloat16 [groups, N, 2]."""
    s = scale.to(torch.bfloat16)
    o = torch.zeros_like(s) if zero is None else ((MIDDLE - zero.float()) * scale.float()).to(torch.bfloat16)
    return torch.stack((s.T, o.T), dim=-1).contiguous()


def int4_linear(x: Tensor, packed: Tensor, scales: Tensor, group: int) -> Tensor:
    """x [..., K] times the transpose of the weight in `packed` [N, K / 2], in the dtype of x."""
    rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    made: Tensor = int4_product()(rows, packed, group, scales.contiguous())
    return made.to(x.dtype).view(*x.shape[:-1], -1)


def int4_linear_eager(x: Tensor, codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """The reference: rounds what `int4_linear` rounds, the rest is float32; codes [N, K] are not packed."""
    s, o = scales.float().repeat_interleave(group, dim=0).unbind(-1)
    weight = (codes.float() - MIDDLE) * s.T + o.T
    return F.linear(x.to(torch.bfloat16).float(), weight).to(torch.bfloat16).to(x.dtype)


@cache
def int4_product() -> Any:
    """Torch's int4 kernel for bfloat16 rows [M, K], looked up once: calls through `torch.ops` inspect every argument,
    which takes as long as a small norm."""
    return torch.ops.aten._weight_int4pack_mm_for_cpu.default._op
