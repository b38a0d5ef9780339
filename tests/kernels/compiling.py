"""Compiles the flash attention kernels for cards that are not here; `python -m tests.kernels.launching` begins with it.

Triton needs no GPU to write PTX and machine code, but does need a process in which kernels are not interpreted.
Prints a line per kernel: its name, the target in its PTX and the shared memory it uses.
"""

import re
from typing import Any

import torch

from tightfit.kernels.attention.flash_attention import forward_kernel
from tightfit.kernels.attention.flash_attention_dkv import key_gradient_kernel
from tightfit.kernels.attention.flash_attention_dq import query_gradient_kernel
from tightfit.kernels.attention.flash_blocks import Blocks, Problem, passes
from tightfit.kernels.triton_support import triton

HEAD = 32
FLOATS = ("logs", "deltas")
NUMBERS = ("scale", "inner", "outer")


def compile_for(capability: int, kernel: Any, dtype: torch.dtype, blocks: Blocks) -> Any:
    """`kernel` with documents and a window, for tensors of `dtype` whose strides are multiples of 16."""
    from triton.backends.compiler import GPUTarget

    constants = Problem(1.0, 7, 0.0, torch.empty(0)).constants(torch.empty(1, 1, 1, HEAD, dtype=dtype))
    constants |= {"BLOCK_Q": blocks.queries, "BLOCK_K": blocks.keys}
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        stride = name.endswith(("_batch", "_head", "_row"))
        if name in constants:
            signature[name] = "constexpr"
        elif name in NUMBERS:
            signature[name] = "fp32"
        elif stride or name in ("heads", "group", "queries", "keys", "before", "window"):
            signature[name] = "i32"
        else:
            kind = "*bf16" if dtype == torch.bfloat16 else "*fp16"
            signature[name] = "*i32" if name in ("starts", "ends") else "*fp32" if name in FLOATS else kind
        if stride or signature[name].startswith("*"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_flash_attention(capability: int) -> None:
    """Compile forward and both backward kernels with the blocks that card gets."""
    dtype = torch.float16 if capability < 80 else torch.bfloat16
    blocks = passes(HEAD, dtype, capability // 10)
    kernels = {
        forward_kernel: blocks.forward,
        key_gradient_kernel: blocks.key_gradients,
        query_gradient_kernel: blocks.query_gradients,
    }
    for kernel, own in kernels.items():
        made = compile_for(capability, kernel, dtype, own)
        target = re.search(r"\.target (\w+)", made.asm["ptx"])
        print(made.name, target and target[1], made.metadata.shared)
