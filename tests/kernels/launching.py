"""Compiles what our operators would launch, for a card that is not here: `python -m tests.kernels.launching 75 90`.

The interpreter accepts much that Triton's compiler refuses. Each launch is caught and its kernel compiled for the given
compute capabilities from the very arguments of that launch; a line per kernel says which, and the target of its PTX.
Needs a process in which kernels are not interpreted. First come the flash attention kernels (compiling.py).

A kernel is compiled for the first card that launches it, and every second of its variants; with `all`, all of them for
every card.
"""

import re
import sys
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

import tightfit.kernels.attention.flash_blocks
import tightfit.kernels.attention.join_parts
import tightfit.kernels.attention.rope
import tightfit.kernels.decoding.decode_attention
import tightfit.kernels.decoding.decode_linear
import tightfit.kernels.decoding.few_rows
import tightfit.kernels.decoding.greedy
import tightfit.kernels.decoding.low_rank_rows
import tightfit.kernels.decoding.paged_attention
import tightfit.kernels.decoding.paged_prefill
import tightfit.kernels.decoding.rotate_store
import tightfit.kernels.decoding.top_k_top_p
import tightfit.kernels.experts.gather_rows
import tightfit.kernels.experts.routed_mlp
import tightfit.kernels.fp8.fp8_mlp
import tightfit.kernels.fp8.fp8_quantize
import tightfit.kernels.loss.distillation_rows
import tightfit.kernels.loss.split_sum
import tightfit.kernels.mlp.glu
import tightfit.kernels.norm.row_norm
import tightfit.kernels.optimizer.adamw
import tightfit.kernels.optimizer.adamw8bit
import tightfit.kernels.optimizer.adamw_list
import tightfit.kernels.optimizer.clip_estimate
import tightfit.kernels.optimizer.gradient_norm
import tightfit.kernels.quantized.fp8_rows
import tightfit.kernels.quantized.fp8_vector
import tightfit.kernels.quantized.packed_blocks
import tightfit.kernels.quantized.packed_rows
import tightfit.kernels.quantized.packed_vector
import tightfit.kernels.quantized.quantized_linear
import tightfit.kernels.quantized.rounded_matmul
import tightfit.kernels.quantized.spqr_linear
from tests.kernels.compiling import compile_flash_attention
from tests.kernels.test_spqr_linear import weights as spqr_weights
from tightfit.kernels.loss.linear_distillation import DistillationTerms, Divergence
from tightfit.kernels.triton_support import triton
from tightfit.models.spec import Activation

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint16: "*u16",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}
Variant = TypeVar("Variant")
Parts = dict[str, Any]


class Card:
    """One of those that are compiled for, and its share of variants: of each kind, all or every second."""

    def __init__(self, capability: int, *, gets_all: bool) -> None:
        self.capability = capability
        self.narrow = torch.float16 if capability < 80 else torch.bfloat16
        self.share = slice(None) if gets_all else slice(None, None, 2)

    def some(self, *variants: Variant) -> Iterable[Variant]:
        """This card's of these."""
        return variants[self.share]


launched: set[Any] = set()
"""Kernels that have been compiled for any card."""


def compile_launch(kernel: Any, arguments: dict[str, Any], warps: int, capability: int) -> Any:
    """`kernel` as a launch with `arguments` would compile it."""
    from triton.backends.compiler import GPUTarget

    signature, constants, aligned = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(index,)] = "constexpr", value
            continue
        signature[parameter.name] = _kind(value)
        if isinstance(value, Tensor) or (
            isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
        ):
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def _kind(value: Any) -> str:
    """What Triton calls an argument."""
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
    return TYPES[value.dtype] if isinstance(value, Tensor) else "fp32" if isinstance(value, float) else "i32"


def catch_launches(capability: int, others: set[Any]) -> None:
    """From now on launching a kernel that is not among `others` compiles it and prints a line instead."""

    def run(kernel: Any, *given: Any, grid: Any, warmup: bool, num_warps: int = 4, **constants: Any) -> None:
        if kernel in others:
            return
        launched.add(kernel)
        named = dict(zip(kernel.arg_names, given, strict=False)) | constants
        made = compile_launch(kernel, named, num_warps, capability)
        target = re.search(r"\.target (\w+)", made.asm["ptx"])
        print(kernel.__module__, made.name, target and target[1])

    triton.JITFunction.run = run


def launch_everything(card: Card) -> None:
    """Each operator, forward and backward, with and without its optional parts."""
    ops, dtype = torch.ops.tightfit, card.narrow
    x, weight = torch.ones(64, 1024, dtype=dtype), torch.ones(1024, dtype=dtype)
    for bias, residual, centred in card.some((None, None, False), (weight, x, True)):
        _, _, stats = ops.row_norm(x, weight, bias, residual, 1e-6, 0.0, centred, card.capability >= 90)
        ops.row_norm_backward(x, residual, x, weight, stats, 0.0, 2 if centred else 1)
    for activation in card.some(*tightfit.kernels.mlp.glu.ACTIVATIONS):
        ops.glu_backward(x, x, x, activation)
    ops.glu(x, None, "relu2", False)
    rows = torch.zeros(len(x), 2, dtype=torch.long)
    ops.gather_rows(x, rows.flatten())
    for other, shares in card.some((None, None), (x, x[:, :2])):
        ops.combine_rows(x, other, shares, rows)
    ops.routed_mlp_row_gradients_(x, x, x, x[:, 0].contiguous(), x, x, x[:, 0].contiguous(), "silu")
    q, k, table = torch.ones(2, 4, 8, 64, dtype=dtype), torch.ones(2, 2, 8, 64, dtype=dtype), torch.ones(1, 1, 8, 24)
    for interleaved in card.some(False, True):
        ops.rope(q, k, table, table, interleaved, True)
    logs = torch.ones(q.shape[:3])
    for joined in card.some((q, q, q.float(), (logs, logs)), (q.float(), q, q, None)):
        tightfit.kernels.attention.join_parts._launch(*joined)
    divergences: tuple[Divergence, ...] = ("jsd", "reverse")
    for divergence in card.some(*divergences):
        terms = DistillationTerms(divergence=divergence)
        tightfit.kernels.loss.distillation_rows.read_pair_rows(x, x, rows[:, 0], x[:, 0].float(), terms, torch.ones(1))
    sums = tightfit.kernels.loss.split_sum.SplitSum(x)
    for sums.is_empty in card.some(True, False):
        sums.add(0, x.float())
    sums.rounded(torch.ones(1), in_place=True)
    launch_updates(card, x)


def launch_updates(card: Card, x: Tensor) -> None:
    """AdamW over float32 masters with a narrow copy, over narrow weights rounded stochastically, and over lists."""
    m, m_scale, v, v_scale = tightfit.kernels.optimizer.adamw8bit.zero_moments(x)
    for weight, copy, factor, key in card.some((x.float(), x, torch.ones(()), None), (x, None, None, 2**31 + 1)):
        numbers = tightfit.kernels.optimizer.adamw.Numbers(1e-3, 0.9, 0.95, 1e-8, 0.1, 1, key)
        tightfit.kernels.optimizer.adamw._launch(weight, copy, x, x.float(), x, factor, numbers)
        tightfit.kernels.optimizer.adamw8bit._launch(weight, copy, x, m, m_scale, v, v_scale, factor, numbers)
    for tensor in card.some(x, x.float()[:, 1:].contiguous()):
        tightfit.kernels.optimizer.adamw_list._launch(([tensor],) * 4, None, numbers)
        tightfit.kernels.optimizer.gradient_norm._launch([tensor])
    pair = torch.ones(2)
    tightfit.kernels.optimizer.clip_estimate._launch(torch.ones(2, 9), 3, pair, pair, 1.0)


def launch_codes(x: Tensor) -> None:
    """What fp8 matmuls launch beside their products, on cards that have them."""
    fp8, mlp = tightfit.kernels.fp8.fp8_quantize, tightfit.kernels.fp8.fp8_mlp
    for dtype in fp8.LARGEST:
        fp8._launch(x, None, dtype, True, True)
    fp8._launch_rows(x)
    fp8._launch_columns(x)
    launch_coded_products(x.dtype)
    mlp._launch(x, x, "silu")
    mlp._launch_backward(x, x, x, x, x, "silu")


def launch_coded_products(dtype: torch.dtype) -> None:
    """Products with a weight of 8-bit floats or integers, of one token, of several and of many; of 16 bits, of some."""
    codes, scale, x = torch.ones(64, 512).to(torch.float8_e4m3fn), torch.ones(64), torch.ones(3, 512, dtype=dtype)
    tightfit.kernels.quantized.fp8_vector.fp8_vector(x[:1], codes, scale, norm=x[0], activation="silu", overlap=True)
    rows = tightfit.kernels.quantized.fp8_rows
    for split in (1, 2):
        rows.fp8_rows(
            x, codes, scale, rows.Fp8Tile(block_m=16, block_n=64, block_k=128, split=split, stages=4, warps=4)
        )
    rows.expand_fp8(codes, scale, dtype)
    few, wide = torch.ones(17, 512, dtype=dtype), torch.ones(256, 512, dtype=dtype)
    activations: tuple[Activation | Literal[""], ...] = ("silu", "")
    for activation in activations:
        tightfit.kernels.decoding.few_rows.few_rows(few, wide, few[0, :256], activation, overlap=True)
    rounded = tightfit.kernels.quantized.rounded_matmul
    for kind, tokens, known in (
        (torch.int8, 3, None),
        (torch.int8, 200, scale[:1]),
        (torch.float8_e4m3fn, 3, scale[:1]),
    ):
        both: Tensor = torch.ones(tokens, 1024, dtype=dtype)
        kept: Activation = "silu" if known is None else "gelu_tanh"
        q, row_scale = rounded.round_rows(both, kind, known, kept, overlap=tokens == 3)
        weight, product = torch.ones(64, 512).to(kind), rounded.multiply_few if tokens == 3 else rounded._square
        product(q, weight, row_scale, scale[:, None], dtype)


def launch_packed_blocks(dtype: torch.dtype) -> None:
    """Scales of the dtype of x and others, applied in either place, alone and beside others that share the inputs."""
    blocks, x = tightfit.kernels.quantized.packed_blocks, torch.ones(17, 256, dtype=dtype)
    words, scale = torch.ones(256, 32, dtype=torch.int32), torch.ones(2, 256, dtype=torch.float16).t()
    zero = scale.to(torch.uint8)
    places: tuple[tuple[Literal["sums", "weights"], int, Tensor], ...]
    places = (("sums", 2, scale), ("weights", 1, scale), ("weights", 1, scale.to(dtype)))
    for scaled, split, scales in places:
        cut = blocks.Blocks(block_m=32, block_n=128, split=split, stages=3, warps=8, scaled=scaled)
        blocks.launch_blocks(x, words, scales, zero if split > 1 else None, 128, cut, overlap=split > 1)


def launch_packed_products(card: Card) -> None:
    """Products with packed weights: of one token, of several, of some, and the weight expanded for many."""
    dtype, overlap = card.narrow, card.capability >= 90
    packed, scale = torch.ones(256, 32, dtype=torch.int32), torch.ones(256, 2, dtype=torch.float16)
    cut = tightfit.kernels.quantized.quantized_linear.Tiles(block_m=16, block_n=128, split=2, stages=3, warps=4)
    tightfit.kernels.quantized.quantized_linear.launch_some(
        torch.ones(17, 256, dtype=dtype), packed, scale, None, 4, 128, cut
    )
    for zero in card.some(None, scale):
        tightfit.kernels.quantized.quantized_linear._run_expand(packed, scale, zero, 4, 128, dtype)
    rows, few = tightfit.kernels.quantized.packed_rows, torch.ones(3, 256, dtype=dtype)
    share = rows.RowTiles(block_n=32, parts=2, stages=3)
    if card.capability == 90:
        launch_packed_blocks(dtype)
    added: Parts = {"zero": None, "residual": few}
    for parts in card.some(added, {"zero": scale, "activation": "silu"}):
        rows.launch_packed_rows(few, packed, scale, bits=4, group=128, tiles=share, **parts, overlap=overlap)
    one, bias = torch.ones(1, 256, dtype=dtype), packed[:, 0].to(dtype)
    around: Parts = {"zero": scale, "norm": one[0], "bias": bias, "activation": "silu"}
    for parts in card.some({"zero": None, "residual": one, "out_dtype": torch.float32}, around):
        tightfit.kernels.quantized.packed_vector.packed_vector(
            one, packed, scale, bits=4, group=128, **parts, overlap=overlap
        )
    launch_outliers(card)


def launch_outliers(card: Card) -> None:
    """Products with SpQR's weights of one token and of several, and the weight expanded for many."""
    spqr, (weight, _) = tightfit.kernels.quantized.spqr_linear, spqr_weights(512, 64, 3)
    for rows, block_n in card.some((1, 16), (16, 32)):
        cut = spqr.SpqrTiles(block_n=block_n, parts=2, stages=1)
        spqr.launch_spqr_rows(torch.ones(rows, 512, dtype=card.narrow), weight, cut)
    spqr._run_expand(*weight[:-1], card.narrow)


def launch_adapters(card: Card) -> None:
    """What requests' adapters add to a product, of one rank or of several."""
    rows = tightfit.kernels.decoding.low_rank_rows
    x, y = torch.ones(3, 64, dtype=card.narrow), torch.ones(3, 128, dtype=card.narrow)
    for ranks in card.some((8, 8), (4, 16)):
        pairs = [[(x[:1].repeat(rank, 1), y[0, :, None].repeat(1, rank))] for rank in ranks]
        rows._launch(
            y, x, torch.zeros(3, dtype=torch.int64), rows.LowRankRows.of(pairs, (128,)), overlap=card.capability >= 90
        )


def launch_cuts(card: Card) -> None:
    """What cuts a distribution, by either setting or by both."""
    chances, column = torch.ones(2, 999), torch.ones(2, 1)
    for settings in card.some((column, None), (None, column), (column, column)):
        tightfit.kernels.decoding.top_k_top_p._launch(chances, *settings)


def launch_decoding(card: Card) -> None:
    """What a decoding step launches, for one token and for several, and prompts beside it."""
    dtype, overlap = card.narrow, card.capability >= 90
    launch_packed_products(card)
    launch_adapters(card)
    launch_cuts(card)
    decode = tightfit.kernels.decoding.decode_linear
    weight, norm = torch.ones(256, 128, dtype=dtype), torch.ones(128, dtype=dtype)
    cache, tables = torch.ones(4, 16, 2, 64, dtype=dtype), torch.ones(3, 4, dtype=torch.int32)
    numbers, half = torch.ones(3, dtype=torch.int64), torch.ones(8, 32, dtype=dtype)
    x, residual = torch.ones(1, 128, dtype=dtype), torch.ones(1, 256, dtype=dtype)
    biased: Parts = {"norm": norm, "bias": weight[:, 0].contiguous()}
    added = {"residual": residual, "out_dtype": torch.float32}
    for parts in card.some(biased, {"activation": "silu", "norm": norm}, added):
        decode.decode_linear(x, weight, **parts, overlap=overlap)
    qkv, counters = torch.ones(3, 8 * 64, dtype=dtype), torch.zeros(8, dtype=torch.int32)
    for weights in card.some((None, None), (cache[0, 0, 0], cache[0, 0, 0])):
        tightfit.kernels.decoding.rotate_store.rotate_store(
            qkv, cache, cache, numbers, numbers, half, half, heads=4, q_norm=weights[0], k_norm=weights[1]
        )
    tightfit.kernels.decoding.decode_attention.decode_attention(
        qkv,
        cache,
        cache,
        tables,
        numbers,
        half,
        half,
        counters,
        heads=4,
        scale=1.0,
        window=9,
        softcap=2.0,
        q_norm=cache[0, 0, 0],
        k_norm=cache[0, 0, 0],
        splits=4,
        overlap=overlap,
    )
    blocks = tightfit.kernels.attention.flash_blocks.Blocks(64, 32, 4, 1)
    query, tiles = qkv[:, :256].view(3, 4, 64), torch.ones(2, 4, dtype=torch.int32)
    sinks = query[0, :, 0].contiguous()
    for own_sinks in card.some(None, sinks):
        tightfit.kernels.decoding.paged_prefill.paged_prefill(
            query, cache, cache, tables, tiles, query, scale=1.0, window=9, sinks=own_sinks, blocks=blocks
        )
    tightfit.kernels.decoding.greedy.launch(qkv, numbers, numbers, counters)
    sunk: Parts = {"splits": 4, "sinks": sinks}
    for parts in card.some(sunk, {"splits": 4, "softcap": 2.0}, {"splits": 1, "softcap": 2.0}):
        tightfit.kernels.decoding.paged_attention.paged_attention(
            query, cache, cache, tables, numbers, scale=1.0, window=9, **parts
        )


def main(*arguments: str) -> None:
    """For each compute capability among `arguments`."""
    gets_all = "all" in arguments
    capabilities = [int(argument) for argument in arguments if argument != "all"]
    for capability in capabilities:
        compile_flash_attention(capability)
    for capability in capabilities:
        catch_launches(capability, set() if gets_all else set(launched))
        card = Card(capability, gets_all=gets_all)
        launch_everything(card)
        launch_decoding(card)
        if capability >= 90:
            launch_codes(torch.ones(64, 1024, dtype=torch.bfloat16))


if __name__ == "__main__":
    main(*sys.argv[1:])
