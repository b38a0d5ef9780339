"""AWQ's layout (AutoAWQ's `gemm` version, vLLM): 4 bits, packed along the outputs in an interleaved order.

qweight [in, out / 8] int32    qzeros [groups, out / 8] int32    scales [groups, out] fp16
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.quantized.packing import pack_awq, unpack_awq
from tightfit.models.huggingface.weight_names import HEAD_MODULE
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.formats.format import NUMBERS, WORDS, FileFormat, one_scheme, stored
from tightfit.models.quantized.scheme import Scheme


class Awq(FileFormat):
    """`quant_method: awq`."""

    name = "awq"
    suffixes = ("qweight", "qzeros", "scales")
    marks = ("qweight",)
    dtypes: ClassVar = {"qweight": WORDS, "qzeros": WORDS, "scales": NUMBERS}

    def refuse(self, scheme: Scheme) -> str | None:
        plain = scheme.kind == "int" and not scheme.outliers and scheme.activations is None
        return (
            None
            if plain and scheme.bits == 4 and scheme.group > 0
            else "it has 4-bit integers in groups only, without outliers"
        )

    def refuse_module(self, module: str) -> str | None:
        return "its readers keep the output projection plain; use compressed-tensors" if module == HEAD_MODULE else None

    def refuse_shape(self, outputs: int, inputs: int, scheme: Scheme) -> str | None:
        return f"{outputs} outputs fill no whole words of 4-bit codes, as AWQ needs" if outputs % 8 else None

    def encode(self, weight: CodedWeight) -> dict[str, Tensor]:
        if weight.group_of is not None:
            raise UserError("AWQ's format has no groups out of order; quantize without act_order: groups")
        if (why := self.refuse_shape(*weight.shape, weight.scheme)) is not None:
            raise UserError(why)
        zero = (
            weight.zero if weight.zero is not None else weight.scale.new_full(weight.scale.shape, weight.scheme.middle)
        )
        return {
            "qweight": pack_awq(weight.codes.T.contiguous()),
            "qzeros": pack_awq(zero.T.to(torch.uint8).contiguous()),
            "scales": weight.scale.T.to(torch.float16).contiguous(),
        }

    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme, module: str) -> CodedWeight:
        words, zeros, scales = (stored(tensors, name, module) for name in self.suffixes)
        zero = unpack_awq(zeros).T.to(torch.float32)
        return CodedWeight(
            scheme,
            unpack_awq(words).T.contiguous(),
            scales.T.to(torch.float32).contiguous(),
            None if scheme.symmetric else zero.contiguous(),
        )

    def config(self, schemes: Mapping[str, Scheme], plain: Iterable[str]) -> dict[str, Any]:
        scheme = one_scheme(schemes, "AWQ")
        kept = [module for module in plain if module != HEAD_MODULE]
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": scheme.group,
            "zero_point": not scheme.symmetric,
            "version": "gemm",
            "modules_to_not_convert": kept or None,
        }
