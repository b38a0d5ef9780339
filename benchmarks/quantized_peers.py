"""Other packages' products with packed weights, for quantized_linear.py: what is installed, by its own codes.

vLLM's Marlin (4-bit integers in groups, symmetric) and CUTLASS product of 8-bit integers, torchao's layers as its
`quantize_` makes them, and bitsandbytes' NF4. A package that is there and refuses the card or the shape says why.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from tightfit.models.quantized.ranges import fit_grid
from tightfit.models.quantized.scheme import Scheme

Product = Callable[[Tensor], Tensor]
Made = tuple[Product, int]
"""A product and the bytes of its weight."""
MARLIN_PER_WORD = 8


def peers(weight: Tensor, group: int) -> Iterator[tuple[str, Made]]:
    """Names and products of what is installed and takes this weight [N, K]."""
    for package, name, make in MAKERS:
        if find_spec(package) is None:
            continue
        try:
            yield name.format(group=group), make(weight, group)
        except (RuntimeError, ImportError, AttributeError, AssertionError, NotImplementedError) as error:
            print(f"{name.format(group=group)} refuses: {str(error).splitlines()[0]}", flush=True)


def marlin(weight: Tensor, group: int) -> Made:
    """vLLM's Marlin: codes of eight inputs a word, as GPTQ packs them, repacked by its own kernel."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    N, K = weight.shape
    made = fit_grid(weight.float(), Scheme(bits=4, group=group, symmetric=True)).code(weight.float())
    shifts = 4 * torch.arange(MARLIN_PER_WORD, device=weight.device)
    codes = made.codes.T.reshape(K // MARLIN_PER_WORD, MARLIN_PER_WORD, N).to(torch.int64)
    words = (codes << shifts[:, None]).sum(1).to(torch.int32)
    packed = ops.gptq_marlin_repack(words, torch.empty(0, dtype=torch.int32, device=weight.device), K, N, 4)
    scale = marlin_utils.marlin_permute_scales(made.scale.T.contiguous().to(weight.dtype), K, N, group)
    workspace = marlin_utils.marlin_make_workspace_new(weight.device)

    def run(x: Tensor) -> Tensor:
        made: Tensor = ops.marlin_gemm(
            a=x,
            c=None,
            b_q_weight=packed,
            b_bias=None,
            b_scales=scale,
            a_scales=None,
            global_scale=None,
            b_zeros=None,
            g_idx=None,
            perm=None,
            workspace=workspace,
            b_q_type=scalar_types.uint4b8,
            size_m=x.shape[0],
            size_n=N,
            size_k=K,
            use_fp32_reduce=True,
        )
        return made

    return run, packed.nbytes + scale.nbytes


def cutlass_int8(weight: Tensor, group: int) -> Made:
    """vLLM's: rows rounded as they come, a scale a row of both factors."""
    from vllm import _custom_ops as ops

    made = fit_grid(weight.float(), Scheme(bits=8, group=0)).code(weight.float())
    codes, scale = (made.codes.to(torch.int16) - 128).to(torch.int8), made.scale.float()

    def run(x: Tensor) -> Tensor:
        rows, row_scale, _ = ops.scaled_int8_quant(x)
        made: Tensor = ops.cutlass_scaled_mm(rows, codes.t(), row_scale, scale, x.dtype)
        return made

    return run, codes.nbytes


def torchao_layer(config: str) -> Callable[[Tensor, int], Made]:
    """A linear layer that torchao's `quantize_` has changed by the configuration of that name."""

    def make(weight: Tensor, group: int) -> Made:
        from torchao import quantization

        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)
        layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
        settings = {"group_size": group} if config.startswith("Int4") else {}
        quantization.quantize_(layer, getattr(quantization, config)(**settings))
        bits = 4 if config.startswith("Int4") else 8
        return layer, weight.numel() * bits // 8

    return make


def bitsandbytes_nf4(weight: Tensor, group: int) -> Made:
    """bitsandbytes' NF4 in blocks of 64, scales in float32."""
    import bitsandbytes
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)

    def run(x: Tensor) -> Tensor:
        made: Tensor = bitsandbytes.matmul_4bit(x, codes.t(), state)
        return made

    return run, codes.nbytes + state.absmax.nbytes


MAKERS: tuple[tuple[str, str, Callable[[Tensor, int], Made]], ...] = (
    ("torchao", "torchao int4 g{group}", torchao_layer("Int4WeightOnlyConfig")),
    ("torchao", "torchao w8a16", torchao_layer("Int8WeightOnlyConfig")),
    ("torchao", "torchao w8a8 int8", torchao_layer("Int8DynamicActivationInt8WeightConfig")),
    ("bitsandbytes", "bitsandbytes nf4", bitsandbytes_nf4),
    ("vllm", "marlin w4a16 g{group}", marlin),
    ("vllm", "vllm w8a8 int8", cutlass_int8),
)
