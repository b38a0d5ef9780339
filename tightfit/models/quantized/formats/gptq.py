"""GPTQ's layout (AutoGPTQ, GPTQModel, vLLM): codes packed along the inputs, groups possibly out of order.

    qweight [in · bits / 32, out] int32    qzeros [groups, out · bits / 32] int32    scales [groups, out] fp16
    g_idx [in] int32: the group of each input

Zero points are stored minus one (`checkpoint_format: gptq`); `gptq_v2` stores them as they are. Symmetric codes have
the zero point 2^(bits − 1) written out.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.quantized.packing import pack, unpack
from tightfit.models.huggingface.weight_names import HEAD_MODULE
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.described import GPTQ_BITS
from tightfit.models.quantized.formats.format import NUMBERS, SIZES, WORDS, FileFormat, one_scheme, stored
from tightfit.models.quantized.scheme import Scheme


class Gptq(FileFormat):
    """`quant_method: gptq`."""

    name = "gptq"
    suffixes = ("qweight", "qzeros", "scales", "g_idx")
    marks = ("qweight",)
    dtypes: ClassVar = {"qweight": WORDS, "qzeros": WORDS, "scales": NUMBERS, "g_idx": SIZES}

    def __init__(self, *, zeros_minus_one: bool = True, reordered: bool = False) -> None:
        self.zeros_minus_one, self.reordered = int(zeros_minus_one), reordered

    def refuse(self, scheme: Scheme) -> str | None:
        if scheme.kind != "int" or scheme.outliers or scheme.activations is not None:
            return "it has integers only, without outliers or rounded activations"
        if scheme.bits not in GPTQ_BITS:
            return f"it has {', '.join(map(str, GPTQ_BITS))} bits"
        return "it has a scale per row at least" if scheme.group < 0 else None

    def refuse_shape(self, outputs: int, inputs: int, scheme: Scheme) -> str | None:
        if inputs * scheme.bits % 32 == outputs * scheme.bits % 32 == 0:
            return None
        return f"a matrix of {outputs} × {inputs} fills no whole words of {scheme.bits}-bit codes, as GPTQ needs"

    def encode(self, weight: CodedWeight) -> dict[str, Tensor]:
        bits, (outputs, inputs) = weight.scheme.bits, weight.shape
        if (why := self.refuse_shape(outputs, inputs, weight.scheme)) is not None:
            raise UserError(why)
        groups = weight.scheme.groups(inputs)
        zero = (
            weight.zero if weight.zero is not None else weight.scale.new_full(weight.scale.shape, weight.scheme.middle)
        )
        codes = (zero.to(torch.int64) - self.zeros_minus_one) % weight.scheme.levels
        order = weight.group_of
        if order is None:
            order = torch.arange(inputs, device=weight.codes.device) // (-(-inputs // groups))
        return {
            "qweight": pack(weight.codes, bits).T.contiguous(),
            "qzeros": pack(codes.T, bits),
            "scales": weight.scale.T.to(torch.float16).contiguous(),
            "g_idx": order.to(torch.int32),
        }

    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme, module: str) -> CodedWeight:
        words, zeros, scales = (stored(tensors, name, module) for name in ("qweight", "qzeros", "scales"))
        inputs, outputs = words.shape[0] * 32 // scheme.bits, scales.shape[1]
        zero = (unpack(zeros, scheme.bits, outputs).to(torch.int64) + self.zeros_minus_one) % scheme.levels
        order = tensors.get("g_idx")
        if order is not None and (len(order) != inputs or int(order.max()) >= len(scales) or int(order.min()) < 0):
            raise UserError(f"g_idx of {module} names groups that are not there; download the model again")
        in_order = order is None or bool(
            (order == torch.arange(inputs, device=order.device) // max(scheme.group, 1)).all()
        )
        symmetric = bool((zero == scheme.middle).all()) and scheme.symmetric
        return CodedWeight(
            scheme,
            unpack(words.T.contiguous(), scheme.bits, inputs),
            scales.T.to(torch.float32).contiguous(),
            None if symmetric else zero.T.to(torch.float32).contiguous(),
            None if in_order or scheme.group <= 0 else order,
        )

    def config(self, schemes: Mapping[str, Scheme], plain: Iterable[str]) -> dict[str, Any]:
        scheme = one_scheme(schemes, "GPTQ")
        if left := [module for module in plain if module != HEAD_MODULE]:
            raise UserError(f"{left[0]} is not quantized, but GPTQ has all layers or none; use compressed-tensors")
        return {
            "quant_method": "gptq",
            "bits": scheme.bits,
            "group_size": scheme.group or -1,
            "sym": scheme.symmetric,
            "desc_act": self.reordered,
            "damp_percent": 0.01,
            "true_sequential": True,
            "lm_head": HEAD_MODULE in schemes,
            "checkpoint_format": "gptq" if self.zeros_minus_one else "gptq_v2",
        }
