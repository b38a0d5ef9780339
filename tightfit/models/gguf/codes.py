"""GGUF models whose 4-bit matrices stay in codes, where a CPU kernel multiplies by these
(kernels/quantized/int4_linear.py).

| type | block of 32 numbers | CodedWeight |
|---|---|---|
| Q4_0 | d, 16 bytes of codes: d · (q − 8) | S = d, symmetric |
| Q4_1 | d, m, 16 bytes of codes: d · q + m | S = d, Z = −m / d |

Low nibbles are the first 16 codes, high nibbles the others. A block whose numbers are all equal has d = 0 and becomes
S = m, Z = −1 with codes of 0. Other types, and matrices that the CPU's kernel does not take, are read as float32.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tightfit.kernels.quantized.int4_linear import takes_int4
from tightfit.kernels.quantized.packing import unpack_nibbles
from tightfit.models.blank import blank_decoder
from tightfit.models.decoder import Decoder
from tightfit.models.gguf.config import architecture_of, gguf_spec
from tightfit.models.gguf.file import GgufFile
from tightfit.models.gguf.weights import Source, copy_tensors, matched, ordered_rows
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.directory import replace_module
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.quantized.scheme import Scheme

BLOCK = 32
SCALE_BYTES = 2
NUMBERS = {"Q4_0": 1, "Q4_1": 2}
"""Types that are read as codes, and the float16 numbers that a block has beside its codes."""


def load_coded(file: GgufFile, dtype: torch.dtype) -> Decoder:
    """The model in `file` on the CPU: 4-bit matrices in codes for its kernel, everything else in `dtype`."""
    spec = gguf_spec(file)
    model = blank_decoder(spec, "meta", dtype)
    sources = matched(model, file)
    coded = [name for name, source in sources.items() if _stays_coded(model, name, source, file)]
    biases = {name: model.get_parameter(_bias(name)) for name in coded if _bias(name) in sources}
    for name in coded:
        replace_module(model, name, nn.Identity())
    model.to_empty(device="cpu")
    if spec.tied:
        model.head.weight = model.embed.weight
    for name in coded:
        weight = _read_codes(file, sources[name], name)
        bias = torch.empty(biases[name].shape, dtype=dtype) if name in biases else None
        replace_module(model, name, QuantizedLinear(weight, bias, for_cpu=True))
    copy_tensors(model, file, {name: source for name, source in sources.items() if name not in coded})
    return model


def _bias(name: str) -> str:
    return f"{name.removesuffix('.weight')}.bias"


def _stays_coded(model: Decoder, name: str, source: Source, file: GgufFile) -> bool:
    module = model.get_submodule(name.removesuffix(".weight")) if name.endswith(".weight") else None
    is_coded = file.tensors[source.tensor].kind.name in NUMBERS
    return is_coded and isinstance(module, nn.Linear) and takes_int4(module.out_features, module.in_features, 4, BLOCK)


def _read_codes(file: GgufFile, source: Source, name: str) -> CodedWeight:
    """The codes of the matrix that is the decoder's parameter `name`."""
    kind, spec, interleaved = file.tensors[source.tensor].kind.name, gguf_spec(file), architecture_of(file).interleaved
    parts = _split_blocks(torch.from_numpy(file.read_blocks(source.tensor, source.start, source.stop)), kind)
    parts = {each: ordered_rows(part, name, spec, interleaved) for each, part in parts.items()}
    scheme = Scheme(kind="int", bits=4, group=BLOCK, symmetric=kind == "Q4_0")
    return CodedWeight(scheme, parts["codes"], parts["scale"], parts.get("zero"))


def _split_blocks(rows: Tensor, kind: str) -> Mapping[str, Tensor]:
    """Codes [N, K], scales and for Q4_1 zero points [N, groups] of rows of bytes."""
    numbers = NUMBERS[kind]
    blocks = rows.view(len(rows), -1, SCALE_BYTES * numbers + BLOCK // 2)
    stored = blocks[..., : SCALE_BYTES * numbers].contiguous().view(torch.float16).float()
    halves = unpack_nibbles(blocks[..., SCALE_BYTES * numbers :], high_first=False)
    codes = halves.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)  # all lower halves, then the upper ones
    if kind == "Q4_0":
        return {"codes": codes.flatten(1), "scale": stored[..., 0]}
    d, m = stored.unbind(-1)
    flat = d == 0
    codes = codes.masked_fill(flat[..., None], 0)
    zero = torch.where(flat, -1.0, -m / torch.where(flat, 1.0, d))
    return {"codes": codes.flatten(1), "scale": torch.where(flat, m, d), "zero": zero}
