"""Other packages' methods for one weight matrix, called through their own functions, as coders of our layer loop.

A coder gets a matrix and the second moment of its inputs and gives something with `dequantize()`. What a package does
beside coding a matrix (its own order of layers, its own calibration) is ours here, so that rows differ by method alone.
llama.cpp's own quantizer is the function `ggml_quantize_chunk` of the library inside xllamacpp.

GPTQModel (7.7.0) wants an environment of its own, with setuptools of today, without CUDA to build for:

    pip install -U setuptools wheel ninja
    BUILD_CUDA_EXT=0 pip install --no-build-isolation --no-deps gptqmodel
    pip install pypcre logbar threadpoolctl device-smi defuser tokenicer optimum
    export GPTQMODEL_CPU_WORKERS=2  # it asks for two, also where there is one core
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.compress.calibration.inputs import InputStatistics
from tightfit.compress.recipe import Step
from tightfit.models.quantized.scheme import Scheme


@dataclass(frozen=True)
class Expanded:
    """A matrix as another package's codes hold it."""

    scheme: Scheme
    weight: Tensor

    def dequantize(self) -> Tensor:
        return self.weight


@dataclass(frozen=True)
class Peer:
    """A package's coder; `module` is what must be importable for it."""

    module: str
    code: Callable[[Tensor, InputStatistics | None, Scheme], Tensor]

    def __call__(self, name: str, weight: Tensor, seen: InputStatistics | None, step: Step) -> Any:
        scheme = step.scheme()
        assert scheme is not None
        return Expanded(scheme, self.code(weight, seen, scheme).to(weight.dtype).view_as(weight))


def llm_compressor(weight: Tensor, seen: InputStatistics | None, scheme: Scheme) -> Tensor:
    """llm-compressor's GPTQ with ranges from its own min-max formula and its `static` order."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    assert seen is not None
    args = QuantizationArgs(
        num_bits=scheme.bits,
        symmetric=scheme.symmetric,
        strategy="group",
        group_size=scheme.group,
        actorder="static",
    )
    groups = weight.view(weight.shape[0], -1, scheme.group)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    made = quantize_weight(weight[None].clone(), seen.hessian[None].clone(), scale[None], zero[None], None, args)
    return made[0][0]


def gptqmodel(weight: Tensor, seen: InputStatistics | None, scheme: Scheme) -> Tensor:
    """GPTQModel's GPTQ with our second moment of the inputs."""
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.quantization.gptq import GPTQ

    assert seen is not None
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device)
    layer.weight.data.copy_(weight)
    task = GPTQ(layer, QuantizeConfig(bits=scheme.bits, group_size=scheme.group, sym=scheme.symmetric, desc_act=True))
    task.quantizer.configure(perchannel=True)
    task.H, task.nsamples = seen.hessian.clone() * 2, seen.count
    return task.quantize()[0]


def hqq(weight: Tensor, seen: InputStatistics | None, scheme: Scheme) -> Tensor:
    """HQQ: zero points by half-quadratic optimisation, without data."""
    from hqq.core.quantize import Quantizer

    codes, meta = Quantizer.quantize(
        weight,
        nbits=scheme.bits,
        group_size=scheme.group,
        axis=1,
        device=str(weight.device),
        compute_dtype=torch.float32,
    )
    return Quantizer.dequantize(codes, meta)


def bitsandbytes(weight: Tensor, seen: InputStatistics | None, scheme: Scheme) -> Tensor:
    """bitsandbytes' NF4 with doubly coded scales, or the weights of its LLM.int8."""
    from bitsandbytes import functional

    if scheme.bits == 8:
        codes, largest, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
        return codes.float() * largest[:, None] / 127
    packed, state = functional.quantize_4bit(
        weight.contiguous(), blocksize=64, quant_type="nf4", compress_statistics=True
    )
    return functional.dequantize_4bit(packed, state)


def torchao(weight: Tensor, seen: InputStatistics | None, scheme: Scheme) -> Tensor:
    """torchao's weight-only integers and small floats."""
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        MappingType,
        PerAxis,
        PerGroup,
        quantize_,
    )

    if scheme.kind in ("mxfp4", "nvfp4"):
        return torchao_blocks(weight, scheme.kind)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device)
    layer.weight.data.copy_(weight)
    config = (
        Float8WeightOnlyConfig()
        if scheme.kind == "fp8"
        else IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, f"int{scheme.bits}"),
            granularity=PerGroup(scheme.group) if scheme.group > 0 else PerAxis(0),
            mapping_type=MappingType.SYMMETRIC if scheme.symmetric else MappingType.ASYMMETRIC,
        )
    )
    quantize_(layer, config)
    made: Tensor = layer.weight.dequantize()
    return made


def torchao_blocks(weight: Tensor, kind: str) -> Tensor:
    """torchao's floats of four bits: blocks of 16 with a scale a matrix as well, or blocks of 32."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    if kind == "mxfp4":
        made = MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32)
    else:
        made = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=per_tensor_amax_to_scale(weight.abs().max()))
    numbers: Tensor = made.dequantize(torch.float32)
    return numbers


def ggml_blocks(weight: Tensor, kind: str, importance: Tensor | None) -> Tensor:
    """The matrix as llama.cpp's own quantizer holds it in blocks of GGUF type `kind`."""
    import gguf
    import numpy as np
    import xllamacpp.xllamacpp as library

    quantize = ctypes.CDLL(library.__file__).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    number = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    rows = weight.cpu().contiguous().numpy()
    made = np.empty((rows.shape[0], rows.shape[1] // block * block_bytes), np.uint8)
    weighed = None if importance is None else np.ascontiguousarray(importance.float().cpu().numpy())
    quantize(
        ctypes.c_int(int(number)),
        rows.ctypes.data_as(ctypes.c_void_p),
        made.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(0),
        ctypes.c_int64(rows.shape[0]),
        ctypes.c_int64(rows.shape[1]),
        None if weighed is None else weighed.ctypes.data_as(ctypes.c_void_p),
    )
    return torch.from_numpy(gguf.quants.dequantize(made, number)).to(weight.device)


def our_blocks(weight: Tensor, kind: str, importance: Tensor | None) -> Tensor:
    """The same from our coder, read by the same package."""
    import gguf

    from tightfit.compress.gguf.gguf_blocks import encode_rows

    blocks = encode_rows(weight, kind, importance).cpu().numpy()
    return torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])).to(weight.device)


PEERS = {
    "llm-compressor": Peer("llmcompressor", llm_compressor),
    "gptqmodel": Peer("gptqmodel", gptqmodel),
    "hqq": Peer("hqq", hqq),
    "bitsandbytes": Peer("bitsandbytes", bitsandbytes),
    "torchao": Peer("torchao", torchao),
}
BLOCKS = {"tightfit": our_blocks, "llama.cpp": ggml_blocks}
MODULES = {name: peer.module for name, peer in PEERS.items()} | {"llama.cpp": "xllamacpp", "auto-round": "auto_round"}
"""What must be importable for a package's rows."""
