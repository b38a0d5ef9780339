"""Products of consecutive groups of rows, each group with a matrix of its own, in one launch.

    grouped_matmul   y[m] = x[m] · W[e]        for the rows m of group e      x [M, K], W [E, K, N] → y [M, N]
    grouped_outer    dW[e] = Σ_m a[m]ᵀ b[m]    over the rows m of group e     a [M, N], b [M, K] → dW [E, N, K]

Group e has the rows from offsets[e − 1] (0 for the first) to offsets[e]; groups may be empty, and rows behind the last
group are in no product (grouped_matmul leaves them undefined). The offsets stay on the device: the host neither waits
for them nor knows them, so shapes are those of the whole batch. Sums are float32; no result depends on the order in
which programs run.

On Hopper and later in bf16 it is torch's own grouped product (CUTLASS). Elsewhere, and for sizes that torch does not
take, it is a kernel of ours, whose programs find their group by counting the tiles of the groups before. Without
Triton, a loop over groups.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.operators import on_device_of, operator
from tightfit.kernels.triton_support import Impl, tl, triton, use_triton

ROWS, COLUMNS, DEPTH, WARPS = 64, 128, 32, 4
INTERPRETED = (16, 64, 32)
"""Tile sizes in Triton's interpreter, where every operation of a program costs the same."""
ALIGNMENT_BYTES = 16
HOPPER = (9, 0)


def grouped_matmul(x: Tensor, weights: Tensor, offsets: Tensor, *, impl: Impl = "auto") -> Tensor:
    """x[m] · weights[e] for x [M, K] and weights [E, K, N] of any strides; offsets [E] int32."""
    _check(x, weights, offsets)
    if not use_triton(impl, x):
        return grouped_matmul_eager(x, weights, offsets)
    return _grouped_matmul(x, weights, offsets)


def grouped_outer(a: Tensor, b: Tensor, offsets: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Σ a[m]ᵀ b[m] of each group, [E, N, K] for a [M, N] and b [M, K]."""
    if not use_triton(impl, a):
        return grouped_outer_eager(a, b, offsets)
    return _grouped_outer(a, b, offsets)


def grouped_matmul_eager(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """The reference: one product after another; zeros for rows behind the last group."""
    made = torch.cat([rows @ weight for rows, weight in zip(_groups(x, offsets), weights, strict=True)])
    return made if len(made) == len(x) else F.pad(made, (0, 0, 0, len(x) - len(made)))


def grouped_outer_eager(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """The reference: one product after another."""
    pairs = zip(_groups(a, offsets), _groups(b, offsets), strict=True)
    return torch.stack([rows.T @ others for rows, others in pairs])


def _groups(x: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    ends = offsets.tolist()
    return x[: ends[-1]].split([end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)])


def _check(x: Tensor, weights: Tensor, offsets: Tensor) -> None:
    if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[1] or offsets.shape != weights.shape[:1]:
        raise UserError(
            f"grouped_matmul got x {list(x.shape)}, weights {list(weights.shape)} and offsets {list(offsets.shape)}; "
            "give [M, K], [E, K, N] and [E]"
        )


@triton.jit
def _find_group(tile, offsets_ptr, groups, GROUPS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The group that row tile number `tile` lies in, the tile's first row and the group's end."""
    each = tl.arange(0, GROUPS)
    ends = tl.load(offsets_ptr + each, mask=each < groups, other=0)
    starts = tl.load(offsets_ptr + each - 1, mask=(each > 0) & (each < groups), other=0)
    tiles = tl.where(each < groups, (ends - starts + ROWS - 1) // ROWS, 0)
    group = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(each < group, tiles, 0), 0)
    start = tl.sum(tl.where(each == group, starts, 0), 0)
    end = tl.sum(tl.where(each == group, ends, 0), 0)
    return group, start + (tile - before) * ROWS, end


@triton.jit
def _matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weights_ptr,
    offsets_ptr,
    y_ptr,
    groups,
    depth,
    columns,
    x_stride,
    group_stride,
    depth_stride,
    column_stride,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    column_tiles = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0) // column_tiles
    group, row, end = _find_group(tile, offsets_ptr, groups, GROUPS, ROWS)
    if group >= groups:
        return
    rows = row + tl.arange(0, ROWS)
    n = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    here, there = rows < end, n < columns
    x_at = x_ptr + rows.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = weights_ptr + group.to(tl.int64) * group_stride + k[:, None] * depth_stride + n[None, :] * column_stride
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for done in range(0, depth, DEPTH):
        left = k < depth - done
        x = tl.load(x_at, mask=here[:, None] & left[None, :], other=0.0)
        w = tl.load(w_at, mask=left[:, None] & there[None, :], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
        x_at += DEPTH
        w_at += DEPTH * depth_stride
    y_at = y_ptr + rows.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=here[:, None] & there[None, :])


@triton.jit
def _outer_kernel(  # type: ignore[no-untyped-def]
    a_ptr,
    b_ptr,
    offsets_ptr,
    out_ptr,
    n_size,
    k_size,
    a_stride,
    b_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(offsets_ptr + group)
    n, k = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for row in range(start, end, DEPTH):
        m = row + tl.arange(0, DEPTH)
        here = m < end
        a_at = a_ptr + m.to(tl.int64)[None, :] * a_stride + n[:, None]
        b_at = b_ptr + m.to(tl.int64)[:, None] * b_stride + k[None, :]
        a = tl.load(a_at, mask=(n < n_size)[:, None] & here[None, :], other=0.0)
        b = tl.load(b_at, mask=here[:, None] & (k < k_size)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    out_at = out_ptr + (group * n_size + n[:, None]) * k_size + k[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=(n < n_size)[:, None] & (k < k_size)[None, :])


def _tiles(x: Tensor) -> tuple[int, int, int]:
    return (ROWS, COLUMNS, DEPTH) if x.is_cuda else INTERPRETED


def is_native(*tensors: Tensor) -> bool:
    """Whether torch's grouped product takes these: bf16 on Hopper or later, every row on a boundary of 16 bytes."""
    first = tensors[0]
    if not first.is_cuda or torch.version.hip or torch.cuda.get_device_capability(first.device) < HOPPER:
        return False
    return all(t.dtype == torch.bfloat16 and t.numel() and _is_aligned(t) for t in tensors)


def _is_aligned(x: Tensor) -> bool:
    """One of the last two dimensions is contiguous, and steps along the others are multiples of 16 bytes."""
    strides = x.stride()
    if 1 not in strides[-2:] or x.data_ptr() % ALIGNMENT_BYTES:
        return False
    return all(s == 1 or s * x.element_size() % ALIGNMENT_BYTES == 0 for s in strides)


def _run_matmul(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    if is_native(x, weights):
        return torch._grouped_mm(x, weights, offs=offsets)
    x = x if x.stride(-1) == 1 else x.contiguous()
    (count, depth), (groups, _, columns) = x.shape, weights.shape
    y = x.new_empty(count, columns)
    if y.numel():
        rows, wide, deep = _tiles(x)
        grid = ((triton.cdiv(count, rows) + groups) * triton.cdiv(columns, wide),)
        with on_device_of(x):
            _matmul_kernel[grid](
                x,
                weights,
                offsets,
                y,
                groups,
                depth,
                columns,
                x.stride(0),
                *weights.stride(),
                GROUPS=triton.next_power_of_2(groups),
                ROWS=rows,
                COLUMNS=wide,
                DEPTH=deep,
                num_warps=WARPS,
            )
    return y


def _run_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    a, b = (t if t.stride(-1) == 1 else t.contiguous() for t in (a, b))
    if is_native(a, b):
        return torch._grouped_mm(a.T, b, offs=offsets)
    groups, n, k = len(offsets), a.shape[1], b.shape[1]
    out = a.new_empty(groups, n, k)
    if out.numel():
        rows, wide, deep = _tiles(a)
        with on_device_of(a):
            _outer_kernel[(groups, triton.cdiv(n, rows), triton.cdiv(k, wide))](
                a,
                b,
                offsets,
                out,
                n,
                k,
                a.stride(0),
                b.stride(0),
                ROWS=rows,
                COLUMNS=wide,
                DEPTH=deep,
                num_warps=WARPS,
            )
    return out


_grouped_matmul = operator(
    "grouped_matmul(Tensor x, Tensor weights, Tensor offsets) -> Tensor",
    _run_matmul,
    lambda x, weights, offsets: x.new_empty(x.shape[0], weights.shape[2]),
)
_grouped_outer = operator(
    "grouped_outer(Tensor a, Tensor b, Tensor offsets) -> Tensor",
    _run_outer,
    lambda a, b, offsets: a.new_empty(len(offsets), a.shape[1], b.shape[1]),
)
