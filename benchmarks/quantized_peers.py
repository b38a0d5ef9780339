"""Other packages' products with packed weights, for quantized_linear.py: what is installed, by its own codes.

vLLM's Marlin and Machete (4-bit integers in groups, symmetric) and its CUTLASS products of 8-bit integers and floats,
torchao's weights as its `quantize_` makes them, and bitsandbytes' NF4. vLLM's kernels are called as its layers call
them, through the operators of its library, for which nothing else of it is imported. torchao's products of 8 bits are
single kernels only once compiled, so they are compiled; that takes seconds a shape, so those come last. A package that
is there and refuses the card or the shape says why and is left out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.rows import version_of
from tightfit.kernels.quantized.packing import pack
from tightfit.models.quantized.ranges import fit_grid
from tightfit.models.quantized.scheme import Scheme

Product = Callable[[Tensor], Tensor]
Made = tuple[Product, int]
"""A product and the bytes of its weight."""
Maker = Callable[[Tensor, int], Made]
COMPILED = "compiled"
"""In the names of products that torch.compile makes."""
COMPILED_ROWS = (1, 16, 256)
LIBRARY = "_C_stable_libtorch*.so"
"""vLLM's operators."""
UINT4_AROUND_8 = 4 << 8 | 8 << 17 | 1 << 50
"""vLLM's number for such codes: 4 bits of mantissa, 8 taken off, NaN as in IEEE 754 (its `scalar_types.uint4b8.id`)."""


def peers(group: int) -> Iterator[tuple[str, Maker]]:
    """Names with versions of what is installed, and what makes such a product of a weight [N, K]."""
    for package, name, make in MAKERS:
        if find_spec(package) is not None:
            yield f"{name.format(group=group)} ({package} {version_of(package)})", make


@contextmanager
def told(beginning: str) -> Iterator[None]:
    """Whatever another package raises is printed, and the others are measured."""
    try:
        yield
    except Exception as error:
        print(f"{beginning}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}", flush=True)


@cache
def vllm_operators() -> Any:
    """vLLM's operators, without importing vLLM."""
    spec = find_spec("vllm")
    assert spec is not None
    folders = spec.submodule_search_locations or []
    libraries = [path for folder in folders for path in Path(folder).glob(LIBRARY)]
    assert libraries, f"vLLM has no {LIBRARY}"
    torch.ops.load_library(str(libraries[0]))
    return torch.ops._C


def gptq_words(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Symmetric 4-bit codes of eight inputs a word [K / 8, N], as GPTQ packs them, and scales [K / group, N]."""
    made = fit_grid(weight.float(), Scheme(bits=4, group=group, symmetric=True)).code(weight.float())
    return pack(made.codes, 4).T, made.scale.T.contiguous().to(weight.dtype)


def marlin(weight: Tensor, group: int) -> Made:
    """vLLM's Marlin: the words repacked by its own kernel, scales in the order in which its threads read them."""
    operators = vllm_operators()
    (N, K), (words, scale) = weight.shape, gptq_words(weight, group)
    nothing = torch.empty(0, dtype=torch.int32, device=weight.device)
    packed = operators.gptq_marlin_repack(words.contiguous(), nothing, K, N, 4, False)
    order = [i + 8 * j for i in range(8) for j in range(8)]
    scale = scale.reshape(-1, len(order))[:, order].reshape(-1, N).contiguous()
    processors = torch.cuda.get_device_properties(weight.device).multi_processor_count
    workspace = torch.zeros(processors, dtype=torch.int32, device=weight.device)

    def run(x: Tensor) -> Tensor:
        absent = (
            None,
            None,
            nothing,
            nothing,
            nothing,
        )  # scales of inputs and of all; zero points, groups, their order
        sums = (True, False, True, False)  # whole inputs, no atomic sums, sums in float32, no zero points in floats
        made: Tensor = operators.marlin_gemm(
            x, None, packed, None, scale, *absent, workspace, UINT4_AROUND_8, len(x), N, K, *sums
        )
        return made

    return run, packed.nbytes + scale.nbytes


def machete(weight: Tensor, group: int) -> Made:
    """vLLM's Machete, which it takes before Marlin on Hopper: CUTLASS, of words in an order of its own."""
    operators = vllm_operators()
    words, scale = gptq_words(weight, group)
    packed = operators.machete_prepack_B(words, weight.dtype, UINT4_AROUND_8, weight.dtype)

    def run(x: Tensor) -> Tensor:
        made: Tensor = operators.machete_mm(x, packed, UINT4_AROUND_8, None, scale, None, group, None, None, None)
        return made

    return run, packed.nbytes + scale.nbytes


def cutlass_int8(weight: Tensor, group: int) -> Made:
    """vLLM's: rows rounded as they come, a scale a row of both factors."""
    operators = vllm_operators()
    made = fit_grid(weight.float(), Scheme(bits=8, group=0)).code(weight.float())
    codes, scale = (made.codes.to(torch.int16) - 128).to(torch.int8), made.scale.float().contiguous()

    def run(x: Tensor) -> Tensor:
        rows, row_scale = torch.empty_like(x, dtype=torch.int8), x.new_empty(len(x), 1, dtype=torch.float32)
        operators.dynamic_scaled_int8_quant(rows, x, row_scale, None)
        out = x.new_empty(len(x), len(codes))
        operators.cutlass_scaled_mm(out, rows, codes.t(), row_scale, scale, None)
        return out

    return run, codes.nbytes + scale.nbytes


def cutlass_fp8(weight: Tensor, group: int) -> Made:
    """vLLM's: as its integers, in e4m3."""
    operators = vllm_operators()

    def coded(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        row_scale = x.new_empty(len(x), 1, dtype=torch.float32)
        operators.dynamic_per_token_scaled_fp8_quant(rows, x, row_scale, None)
        return rows, row_scale

    codes, scale = coded(weight)

    def run(x: Tensor) -> Tensor:
        rows, row_scale = coded(x)
        out = x.new_empty(len(x), len(codes))
        operators.cutlass_scaled_mm(out, rows, codes.t(), row_scale, scale, None)
        return out

    return run, codes.nbytes + scale.nbytes


def torchao_weight(weight: Tensor, configuration: str, **settings: Any) -> Tensor:
    """The weight of a linear layer that torchao's `quantize_` has changed."""
    from torchao import quantization

    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    quantization.quantize_(layer, getattr(quantization, configuration)(**settings))
    assert type(layer.weight) is not nn.Parameter, "quantize_ left the weight as it was"
    return layer.weight.detach()


def torchao_int4(weight: Tensor, group: int) -> Made:
    """In tiles for the kernel that torch brings."""
    made = torchao_weight(weight, "Int4WeightOnlyConfig", group_size=group, int4_packing_format="tile_packed_to_4d")
    return (lambda x: F.linear(x, made)), weight.numel() // 2 + weight.numel() // group * 4


def torchao_compiled(configuration: str, row_wise: bool = False) -> Maker:
    """8 bits by that configuration, through torch.compile."""

    def make(weight: Tensor, group: int) -> Made:
        from torchao.quantization import PerRow

        made = torchao_weight(weight, configuration, **({"granularity": PerRow()} if row_wise else {}))
        return (lambda x: compiled_linear()(x, made)), weight.numel() + 4 * len(weight)

    return make


@cache
def compiled_linear() -> Callable[[Tensor, Tensor], Tensor]:
    """x · Wᵀ, compiled for every shape and kind of weight that comes."""
    torch._dynamo.config.recompile_limit = 256

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    return torch.compile(product, dynamic=False)


def bitsandbytes_nf4(weight: Tensor, group: int) -> Made:
    """bitsandbytes' NF4 in blocks of 64, scales in float32."""
    import bitsandbytes
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)

    def run(x: Tensor) -> Tensor:
        made: Tensor = bitsandbytes.matmul_4bit(x, codes.t(), state)
        return made

    return run, codes.nbytes + state.absmax.nbytes


MAKERS: tuple[tuple[str, str, Maker], ...] = (
    ("vllm", "marlin w4a16 g{group}", marlin),
    ("vllm", "machete w4a16 g{group}", machete),
    ("vllm", "cutlass w8a8 int8", cutlass_int8),
    ("vllm", "cutlass w8a8 fp8", cutlass_fp8),
    ("bitsandbytes", "nf4", bitsandbytes_nf4),
    ("torchao", "int4 g{group}", torchao_int4),
    ("torchao", f"w8a16 {COMPILED}", torchao_compiled("Int8WeightOnlyConfig")),
    ("torchao", f"w8a8 int8 {COMPILED}", torchao_compiled("Int8DynamicActivationInt8WeightConfig")),
    ("torchao", f"w8a8 fp8 {COMPILED}", torchao_compiled("Float8DynamicActivationFloat8WeightConfig", row_wise=True)),
)
