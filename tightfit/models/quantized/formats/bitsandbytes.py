"""bitsandbytes' layouts: NF4 with coded scales (double quantization), and LLM.int8.

NF4, `load_in_4bit`: codes of the flattened matrix, two a byte, the first in the high half; a scale per 64 of them.

    weight [n / 2, 1] uint8    weight.absmax uint8 [n / 64]    weight.quant_map [16]
    weight.nested_absmax [n / 64 / 256]    weight.nested_quant_map [256]
    weight.quant_state.bitsandbytes__nf4: a JSON text with shape, block sizes, offset

    scale = nested_quant_map[absmax] · nested_absmax + offset

int8, `load_in_8bit`: `weight` int8 [out, in], `SCB` [out] the largest magnitude of each row; w = q · SCB / 127.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.quantized.packing import pack_nibbles, unpack_nibbles
from tightfit.models.huggingface.weight_names import HEAD_MODULE
from tightfit.models.quantized.codebooks import NF4, dynamic_map
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.described import INT8_SCHEME, NF4_SCHEME
from tightfit.models.quantized.formats.format import NUMBERS, FileFormat, one_scheme, stored
from tightfit.models.quantized.scheme import FIXED_GROUPS, NESTED_BLOCK, Scheme

STATE = "weight.quant_state.bitsandbytes__nf4"
BLOCK = FIXED_GROUPS["nf4"]
NF4_CONFIG = {
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "float32",
    "bnb_4bit_quant_storage": "uint8",
}


class BitsAndBytes(FileFormat):
    """`quant_method: bitsandbytes`."""

    name = "bitsandbytes"
    suffixes = (
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        STATE,
        "SCB",
        "weight_format",
    )
    marks = (STATE, "SCB")
    dtypes: ClassVar = {
        "weight.absmax": (*NUMBERS, torch.uint8),
        "weight.nested_absmax": NUMBERS,
        STATE: (torch.uint8,),
        "SCB": NUMBERS,
    }

    def refuse(self, scheme: Scheme) -> str | None:
        return None if scheme in (NF4_SCHEME, INT8_SCHEME) else "it has NF4 and LLM.int8 only"

    def refuse_module(self, module: str) -> str | None:
        if module == "lm_head":
            return "transformers keeps the output projection plain; use compressed-tensors"
        reason = "transformers cannot use the codes of experts; keep those, by a step for '*.experts.*'"
        return reason if ".experts." in module else None

    def encode(self, weight: CodedWeight) -> dict[str, Tensor]:
        if weight.scheme.kind == "nf4":
            return self._encode_nf4(weight)
        return {
            "weight": (weight.codes.to(torch.int16) - weight.scheme.middle).to(torch.int8),
            "SCB": (weight.scale[:, 0] * 127).to(torch.float32),
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }

    def _encode_nf4(self, weight: CodedWeight) -> dict[str, Tensor]:
        codes = weight.coded_scales
        state = {
            "quant_type": "nf4",
            "blocksize": BLOCK,
            "dtype": "float32",
            "shape": list(weight.shape),
            "nested_blocksize": NESTED_BLOCK,
            "nested_dtype": "float32",
            "nested_offset": float(codes["nested_offset"]),
        }
        return {
            "weight": pack_nibbles(weight.codes.flatten(), high_first=True)[:, None],
            "weight.absmax": codes["absmax"],
            "weight.quant_map": torch.tensor(NF4),
            "weight.nested_absmax": codes["nested_absmax"],
            "weight.nested_quant_map": dynamic_map().clone(),
            STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }

    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme, module: str) -> CodedWeight:
        weight = stored(tensors, "weight", module)
        if scheme.kind == "nf4":
            return self._decode_nf4(tensors, weight, module)
        codes = (weight.to(torch.int16) + scheme.middle).to(torch.uint8)
        return CodedWeight(scheme, codes, (stored(tensors, "SCB", module).to(torch.float32) / 127)[:, None])

    def _decode_nf4(self, tensors: Mapping[str, Tensor], weight: Tensor, module: str) -> CodedWeight:
        state = _state(stored(tensors, STATE, module), module)
        shape, absmax = state["shape"], stored(tensors, "weight.absmax", module)
        codes = unpack_nibbles(weight.flatten().view(torch.uint8), high_first=True)
        if state["blocksize"] != BLOCK or codes.numel() != shape[0] * shape[1] or shape[1] % BLOCK:
            raise UserError(
                f"{module} has blocks of {state['blocksize']} over {shape}, not blocks of {BLOCK} within rows"
            )
        coded: dict[str, Tensor] = {}
        if "weight.nested_absmax" in tensors:
            coded = {
                "absmax": absmax,
                "nested_absmax": tensors["weight.nested_absmax"].to(torch.float32),
                "nested_offset": torch.tensor(float(state["nested_offset"])),
            }
            absmax = nested_scales(coded)
        return CodedWeight(
            NF4_SCHEME, codes.view(*shape), absmax.to(torch.float32).view(shape[0], -1), coded_scales=coded
        )

    def config(self, schemes: Mapping[str, Scheme], plain: Iterable[str]) -> dict[str, Any]:
        four = one_scheme(schemes, "bitsandbytes").kind == "nf4"
        kept = [module for module in plain if module != HEAD_MODULE]
        config: dict[str, Any] = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": four,
            "load_in_8bit": not four,
            "llm_int8_threshold": 6.0,
            "llm_int8_skip_modules": [HEAD_MODULE, *kept],
        }
        return config | (NF4_CONFIG if four else {})


def nested_scales(coded: Mapping[str, Tensor]) -> Tensor:
    """Scales decoded from double quantization, flat."""
    numbers = dynamic_map().to(coded["absmax"].device)[coded["absmax"].long()]
    each = coded["nested_absmax"].repeat_interleave(NESTED_BLOCK)[: len(numbers)]
    return numbers * each + coded["nested_offset"].to(numbers.device)


def code_scales(scale: Tensor) -> dict[str, Tensor]:
    """Scales coded in 8 bits: their mean is subtracted, and 256 of them share a float32 scale."""
    flat = scale.flatten().to(torch.float32)
    offset = flat.mean()
    blocks = torch.nn.functional.pad(flat - offset, (0, -len(flat) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    absmax = blocks.abs().amax(1)
    numbers = dynamic_map().to(flat.device)
    codes = torch.bucketize((blocks / absmax.clamp(min=1e-38)[:, None]).clamp(-1, 1), (numbers[1:] + numbers[:-1]) / 2)
    return {"absmax": codes.flatten()[: len(flat)].to(torch.uint8), "nested_absmax": absmax, "nested_offset": offset}


def _state(text: Tensor, module: str) -> dict[str, Any]:
    """The JSON beside an NF4 weight."""
    try:
        state = json.loads(bytes(text.cpu().tolist()))
        shape = state["shape"]
        if len(shape) != 2 or not all(isinstance(size, int) and 0 < size < 2**31 for size in shape):
            raise ValueError
        float(state.get("nested_offset", 0.0)), int(state["blocksize"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{STATE} of {module} is not what bitsandbytes writes; download the model again") from None
    return dict(state)
