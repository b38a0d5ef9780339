"""RMSNorm and LayerNorm: plain steps, torch's fused operation, torch.compile, Liger, Unsloth, CUDA C++, ours.

The least work is five passes over the activations: read x and write y; read dy and x and write dx.
"""

from collections.abc import Iterator

from torch import Tensor

from benchmarks.operations.case import Case, Forward, Where, compiled, imported
from benchmarks.operations.cuda_rms_norm import make_cuda_rms_norm
from benchmarks.peers.unsloth import unsloth_rms_norm
from tightfit.kernels.norm.layer_norm import layer_norm, layer_norm_eager
from tightfit.kernels.norm.rms_norm import rms_norm, rms_norm_eager

EPS = 1e-6
SHAPES = ((16384, 4096), (8192, 8192), (524288, 128))
"""Tokens × hidden size of an 8B and a 70B model; heads × head size of queries normed one by one."""


def rms_norm_cases(where: Where) -> Iterator[Case]:
    """Alone at several widths, and with the residual addition."""
    for rows, width in SHAPES[:1] if where.tiny else SHAPES:
        yield _alone(where, where.size(rows, 8), where.size(width, 24))
    yield _with_residual(where)


def _alone(where: Where, rows: int, width: int) -> Case:
    return Case(
        "rms_norm",
        f"{rows}×{width}",
        lambda: (where.randn(rows, width), where.randn(width)),
        {
            "eager": lambda: lambda x, w: rms_norm_eager(x, w, EPS)[0],
            "torch": lambda: lambda x, w: rms_norm(x, w, EPS, impl="torch"),
            "torch.compile": compiled(lambda x, w: rms_norm_eager(x, w, EPS)[0]),
            "Liger": _liger_rms_norm,
            "Unsloth": lambda: unsloth_rms_norm(EPS),
            "CUDA C++": lambda: make_cuda_rms_norm(EPS),
            "tightfit": lambda: lambda x, w: rms_norm(x, w, EPS),
        },
        "copy",
        5 * rows * width * where.dtype.itemsize,
    )


def _with_residual(where: Where) -> Case:
    """Eight passes: x and residual read, y and their sum written; dy, the sum and its gradient read, dx written."""
    rows, width = where.size(16384, 8), where.size(4096, 24)

    def eager(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm_eager(x, w, EPS, residual=residual)

    return Case(
        "rms_norm",
        f"{rows}×{width} + residual",
        lambda: (where.randn(rows, width), where.randn(rows, width), where.randn(width)),
        {
            "eager": lambda: eager,
            "torch": lambda: lambda x, residual, w: rms_norm(x, w, EPS, residual=residual, impl="torch"),
            "torch.compile": compiled(eager),
            "Liger": _liger_add_rms_norm,
            "tightfit": lambda: lambda x, residual, w: rms_norm(x, w, EPS, residual=residual),
        },
        "copy",
        8 * rows * width * where.dtype.itemsize,
    )


def _liger_rms_norm() -> Forward:
    function = imported("liger_kernel.ops.rms_norm", "LigerRMSNormFunction", "liger-kernel")
    return lambda x, w: function.apply(x, w, EPS)


def _liger_add_rms_norm() -> Forward:
    function = imported("liger_kernel.ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction", "liger-kernel")
    return lambda x, residual, w: function.apply(x, residual, w, EPS)


def layer_norm_cases(where: Where) -> Iterator[Case]:
    """GPT-2 XL's width and a power of two."""
    for rows, width in ((16384, 4096),) if where.tiny else ((16384, 4096), (32768, 1600)):
        yield _layer_norm(where, where.size(rows, 8), where.size(width, 24))


def _layer_norm(where: Where, rows: int, width: int) -> Case:
    return Case(
        "layer_norm",
        f"{rows}×{width}",
        lambda: (where.randn(rows, width), where.randn(width), where.randn(width)),
        {
            "eager": lambda: lambda x, w, b: layer_norm_eager(x, w, b, EPS)[0],
            "torch": lambda: lambda x, w, b: layer_norm(x, w, b, EPS, impl="torch"),
            "torch.compile": compiled(lambda x, w, b: layer_norm_eager(x, w, b, EPS)[0]),
            "Liger": _liger_layer_norm,
            "tightfit": lambda: lambda x, w, b: layer_norm(x, w, b, EPS),
        },
        "copy",
        5 * rows * width * where.dtype.itemsize,
    )


def _liger_layer_norm() -> Forward:
    function = imported("liger_kernel.ops.layer_norm", "LigerLayerNormFunction", "liger-kernel")
    return lambda x, w, b: function.apply(x, w, b, EPS)
