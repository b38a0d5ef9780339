"""RMSNorm in CUDA C++ (`rms_norm.cu`), built on demand where nvcc is: the last rung of eager → compile → Triton → CUDA.

Compiled as a plain shared library and called through ctypes: a torch extension would spend most of a minute on torch's
headers for two functions that take pointers.
"""

import ctypes
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.operations.case import AbsentError, Forward

SOURCE = Path(__file__).with_name("rms_norm.cu")
WIDTHS = (2048, 4096, 8192)
BLOCKS_PER_MULTIPROCESSOR = 4


def make_cuda_rms_norm(eps: float) -> Forward:
    """rms_norm(x, weight), or AbsentError where there is no nvcc."""
    library = _build()

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        if x.shape[-1] not in WIDTHS:
            raise AbsentError(f"rows of {' or '.join(map(str, WIDTHS))} only")
        return _RmsNorm.apply(x, weight, eps, library)

    return forward


@lru_cache
def _build() -> ctypes.CDLL:
    from torch.utils.cpp_extension import CUDA_HOME

    nvcc = Path(CUDA_HOME or "/nonexistent", "bin", "nvcc")
    if not nvcc.exists():
        raise AbsentError("nvcc is not installed")
    major, minor = torch.cuda.get_device_capability()
    target = Path(tempfile.mkdtemp(prefix="tightfit-")) / "rms_norm.so"
    command = [str(nvcc), "-O3", f"-arch=sm_{major}{minor}", "-shared", "-Xcompiler", "-fPIC", str(SOURCE)]
    built = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, check=False)
    if built.returncode:
        raise AbsentError(f"nvcc failed: {built.stderr.strip().splitlines()[0]}")
    return ctypes.CDLL(str(target))


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, library: ctypes.CDLL) -> Tensor:
        rows, width = x.shape
        y, rstd = torch.empty_like(x), torch.empty(rows, device=x.device)
        _call(library.rms_norm_forward, x, weight, y, rstd, rows, width, ctypes.c_float(eps))
        ctx.save_for_backward(x, weight, rstd)
        ctx.library = library
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        rows, width = x.shape
        blocks = BLOCKS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(x.device).multi_processor_count
        blocks = min(blocks, rows)
        dx, d_weight = torch.empty_like(x), torch.empty_like(weight)
        sums = torch.empty(blocks, width, device=x.device)
        dy = grads[0].contiguous()
        _call(ctx.library.rms_norm_backward, dy, x, weight, rstd, dx, sums, d_weight, rows, width, blocks)
        return dx, d_weight, None, None


def _call(function: Any, *arguments: Any) -> None:
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    passed = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else x for x in arguments]
    code = function(*passed, stream)
    if code:
        raise RuntimeError(f"{function.__name__} failed with CUDA error {code}")
