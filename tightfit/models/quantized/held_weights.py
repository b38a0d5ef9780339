"""Bytes of a compressed model in memory, from its config.json and the headers of its files alone.

| in the files | in memory (linear.py) |
|---|---|
| codes, scales, coded scales, outliers | as they are |
| zero points, as many bits as a code | a byte each: as many as there are scales |
| g_idx | four bytes an input, where groups are out of order |
| NF4's codebook, shapes, descriptions | – |
| what is not quantized, factors of low rank among it | 16 bits |

Nothing here imports torch, and no weight is read.
"""

import json
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tightfit.bounded_files import require_regular
from tightfit.errors import UserError
from tightfit.models.huggingface.families import FAMILIES
from tightfit.models.huggingface.weight_names import HEAD_MODULE, tensor_maps
from tightfit.models.quantized.described import described_scheme
from tightfit.models.quantized.matrices import codable
from tightfit.models.quantized.scheme import Scheme
from tightfit.models.resolve import read_config
from tightfit.models.spec import ModelSpec

PLAIN_BYTES = 2
LARGEST_HEADER_BYTES = 100 * 2**20
"""The limit of safetensors itself."""
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
FLOAT8 = "F8_"
Held = Literal["stored", "zeros", "order", "offset", "nothing"]
HELD: dict[str, dict[str, Held]] = {
    "compressed-tensors": {
        "weight": "stored",
        "weight_packed": "stored",
        "weight_scale": "stored",
        "weight_shape": "nothing",
        "weight_zero_point": "zeros",
        "weight_global_scale": "stored",
        "input_scale": "stored",
        "input_zero_point": "nothing",
    },
    "gptq": {"qweight": "stored", "qzeros": "zeros", "scales": "stored", "g_idx": "order"},
    "awq": {"qweight": "stored", "qzeros": "zeros", "scales": "stored"},
    "bitsandbytes": {
        "weight": "stored",
        "weight.absmax": "stored",
        "weight.quant_map": "nothing",
        "weight.nested_absmax": "stored",
        "weight.nested_quant_map": "offset",
        "weight.quant_state.bitsandbytes__nf4": "nothing",
        "SCB": "stored",
        "weight_format": "nothing",
    },
    "tightfit": {
        "weight_packed": "stored",
        "weight_shape": "nothing",
        "weight_scale": "stored",
        "weight_zero": "zeros",
        "weight_scale_codes": "stored",
        "weight_scale_range": "stored",
        "weight_zero_codes": "stored",
        "weight_zero_range": "stored",
        "outlier_starts": "stored",
        "outlier_columns": "stored",
        "outlier_values": "stored",
    },
}
"""What a layer keeps of every tensor of a quantized module, by layout and suffix."""
SCALES = ("weight_scale", "scales")
"""Suffixes of scales; a module has as many zero points as scales."""
ONLY_CODED = re.compile(r"\.(weight_packed|weight_scale|qweight|SCB|weight\.quant_state\.bitsandbytes__nf4)$")
"""Names of tensors that a quantized module has and a plain one has not."""


@dataclass(frozen=True)
class CodedHead:
    """A quantized output projection: its scheme, and its bytes in memory."""

    scheme: Scheme
    bytes: int


class Matrix(NamedTuple):
    """One of the decoder's matrices: its name and shape."""

    name: str
    outputs: int
    inputs: int


@dataclass(frozen=True, eq=False)
class CodedModule:
    """A quantized module: the decoder's matrices in it, their scheme, and its bytes in memory. Experts have equal ones,
    so a module is equal to itself alone."""

    matrices: tuple[Matrix, ...]
    scheme: Scheme
    bytes: int
    is_ordered: bool = True
    """Whether inputs are in the order of their groups."""

    @property
    def elements(self) -> int:
        """How many weights it has."""
        return sum(each.outputs * each.inputs for each in self.matrices)


@dataclass(frozen=True)
class HeldWeights:
    """Bytes of the quantized modules, of everything else, and of expanding the layers' largest matrix; schemes in
    words."""

    coded_bytes: int
    plain_bytes: int
    expanded_bytes: int
    description: str
    scheme: Scheme | None = None
    """The scheme of the layers' modules whose expansion takes most."""
    head: CodedHead | None = None
    """The output projection, where it is quantized; `coded_bytes` include it, `expanded_bytes` do not."""
    modules: tuple[CodedModule, ...] = ()
    """The quantized modules; empty where they are not known one by one (GGUF)."""
    adapted: frozenset[str] = frozenset()
    """The decoder's matrices with an adapter beside them."""
    is_factored: bool = False
    """Whether matrices are held as two factors of low rank."""
    plain_is_wide: bool = False
    """Whether what is not quantized is stored in more than 16 bits."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return self.coded_bytes + self.plain_bytes


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: its type and shape, and where its bytes begin."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int

    @property
    def bytes(self) -> int:
        """Bytes of the tensor as it is stored."""
        return prod(self.shape) * (1 if self.dtype.startswith(FLOAT8) else DTYPE_BYTES.get(self.dtype, 0))


def held_weights(directory: Path, spec: ModelSpec) -> HeldWeights | None:
    """Bytes of the model in `directory`; None where it is not compressed, or its weights are not there."""
    config = read_config(directory / "config.json")
    stored = stored_tensors(directory)
    tensors = {name: tensor for name, tensor in stored.items() if not _is_unused(name, spec)}
    described = config.get("quantization_config") if isinstance(config, dict) else None
    if not tensors:
        return None
    if isinstance(described, dict) and str(described.get("quant_method")) in HELD:
        if HEAD_MODULE in {ONLY_CODED.sub("", name) for name in stored if ONLY_CODED.search(name)}:
            refuse_tied_codes(spec, directory)
        return _quantized(tensors, described, spec)
    if isinstance(config, dict) and "low_rank" in config:
        return HeldWeights(0, _plain_bytes(tensors), 0, "low rank", is_factored=True)
    return None


def refuse_tied_codes(spec: ModelSpec, directory: Path) -> None:
    """Refuse codes of an output projection that config.json ties to the embedding: they would be ignored.

    transformers 5.23 computes with them where it expands codes as it loads them, and ends in an error elsewhere.
    """
    if spec.tied:
        raise UserError(
            f"{directory} has codes of {HEAD_MODULE}, which config.json ties to the embedding; set tie_word_embeddings "
            f"to false there, or remove the tensors of {HEAD_MODULE}"
        )


def _is_unused(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor is of a tied output projection that was written all the same."""
    return spec.tied and name.startswith(f"{HEAD_MODULE}.")


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of the directory's safetensors files, by name."""
    found: dict[str, StoredTensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            found |= _tensors_of(path, require_regular(path))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; download it again") from None
    return found


def _tensors_of(path: Path, file_bytes: int) -> dict[str, StoredTensor]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(LARGEST_HEADER_BYTES, file_bytes):
            raise UserError(f"{path} has a header of {size:,} bytes, which no weights have; download it again")
        header = file.read(size)
    try:
        described = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        return {name: _tensor_of(path, entry, 8 + size, file_bytes) for name, entry in described.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
        raise UserError(f"{path} does not begin with a header of safetensors; download it again") from None


def _tensor_of(path: Path, entry: Any, start: int, file_bytes: int) -> StoredTensor:
    """The tensor that an entry of a header describes, which must lie in the file and be as large as it says."""
    begin, end = (start + int(offset) for offset in entry["data_offsets"])
    tensor = StoredTensor(str(entry["dtype"]), tuple(int(size) for size in entry["shape"]), path, begin)
    if not start <= begin <= end <= file_bytes or min(tensor.shape, default=0) < 0:
        raise ValueError(f"a tensor from {begin} to {end} of {file_bytes} bytes")
    if tensor.bytes not in (0, end - begin):
        raise ValueError(f"{tensor.bytes} bytes from {begin} to {end}")
    return tensor


def _quantized(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any], spec: ModelSpec) -> HeldWeights:
    method = config["quant_method"]
    modules = {ONLY_CODED.sub("", name) for name in tensors if ONLY_CODED.search(name)}
    schemes = {module: described_scheme(method, config, module) for module in modules}
    own = {module: _module_tensors(tensors, module, method) for module in modules}
    coded = {f"{module}.{suffix}" for module, parts in own.items() for suffix in parts}
    plain = {name: tensor for name, tensor in tensors.items() if name not in coded}
    held = {module: _held_bytes(parts, schemes[module], method) for module, parts in own.items()}
    shapes = matrices_of_modules(spec)
    coded_modules = [
        CodedModule(shapes.get(module, ()), schemes[module], held[module], _order_bytes(parts, schemes[module]) == 0)
        for module, parts in own.items()
    ]
    told = sorted({scheme.describe() for scheme in schemes.values()})
    in_layers = [scheme for module, scheme in schemes.items() if module != HEAD_MODULE]
    used = max(in_layers, key=lambda scheme: expanded_bytes(spec, scheme), default=None)
    return HeldWeights(
        coded_bytes=sum(held.values()),
        plain_bytes=_plain_bytes(plain),
        expanded_bytes=0 if used is None else expanded_bytes(spec, used),
        description=", ".join(told),
        scheme=used,
        head=CodedHead(schemes[HEAD_MODULE], held[HEAD_MODULE]) if HEAD_MODULE in schemes else None,
        modules=tuple(coded_modules),
        plain_is_wide=any(DTYPE_BYTES.get(tensor.dtype, 0) > PLAIN_BYTES for tensor in plain.values()),
    )


def matrices_of_modules(spec: ModelSpec) -> dict[str, tuple[Matrix, ...]]:
    """The decoder's matrices in every module that can be quantized, by Hugging Face's names of modules."""
    shapes = {_parameter(name): Matrix(name, *shape) for name, (_, *shape) in codable(spec).items()}
    experts = 0 if spec.experts is None else spec.experts.count
    links = tensor_maps(FAMILIES[spec.family].weights, shapes, spec.layers, experts)
    return {link.theirs.removesuffix(".weight"): tuple(shapes[ours] for ours in link.ours) for link in links}


def _parameter(matrix: str) -> str:
    """The name of a matrix's parameter; experts' are stacked in one."""
    return matrix if ".experts." in matrix else f"{matrix}.weight"


def _module_tensors(tensors: Mapping[str, StoredTensor], module: str, method: str) -> dict[str, StoredTensor]:
    """The tensors of a quantized module, by suffix."""
    return {suffix: tensors[f"{module}.{suffix}"] for suffix in HELD[method] if f"{module}.{suffix}" in tensors}


def _held_bytes(parts: Mapping[str, StoredTensor], scheme: Scheme, method: str) -> int:
    """Bytes that a layer keeps of a module's tensors."""
    scales = sum(prod(parts[name].shape) for name in SCALES if name in parts)
    rules = HELD[method]
    kept = sum(tensor.bytes for suffix, tensor in parts.items() if rules[suffix] == "stored")
    kept += scales if not scheme.symmetric and "zeros" in {rules[suffix] for suffix in parts} else 0
    kept += 4 if "offset" in {rules[suffix] for suffix in parts} else 0
    return kept + _order_bytes(parts, scheme)


def _order_bytes(parts: Mapping[str, StoredTensor], scheme: Scheme) -> int:
    """Bytes of a g_idx in memory: 0 where groups are in order, as a column's number then gives its group."""
    order = parts.get("g_idx")
    if order is None or scheme.group <= 0 or order.dtype != "I32":
        return 0
    with order.path.open("rb") as file:
        file.seek(order.start)
        groups = array("i", file.read(order.bytes))
    return order.bytes if any(group != i // scheme.group for i, group in enumerate(groups)) else 0


def _plain_bytes(tensors: Mapping[str, StoredTensor]) -> int:
    """Bytes of what is not quantized."""
    return PLAIN_BYTES * sum(prod(tensor.shape) for tensor in tensors.values())


def expanded_bytes(spec: ModelSpec, scheme: Scheme) -> int:
    """Bytes that the largest product takes beside its weight; the engine treats layers of one input as one matrix.

    All experts of a layer are expanded while it runs, and one of the three stacks twice while it is stacked.
    """
    sets = [*_attention_products(spec), (spec.hidden_size, spec.output_size)]
    if spec.experts is None or any(not spec.is_routed(i) for i in range(spec.layers)):
        sets += [((1 + spec.gated) * spec.mlp_size, spec.hidden_size), (spec.hidden_size, spec.mlp_size)]
    largest = max(scheme.expanded_bytes(outputs, inputs) for outputs, inputs in sets)
    if spec.experts is None:
        return largest
    return max(largest, 4 * PLAIN_BYTES * spec.experts.count * spec.experts.mlp_size * spec.hidden_size)


def _attention_products(spec: ModelSpec) -> list[tuple[int, int]]:
    """Outputs and inputs of the products that make queries, keys and values; latent attention's are not fused."""
    if spec.latent is None:
        return [(spec.query_size + 2 * spec.kv_size, spec.hidden_size)]
    first = (spec.latent.kv_rank + spec.latent.rope_dim, spec.hidden_size)
    rank = spec.latent.query_rank
    queries = [(rank, spec.hidden_size), (spec.query_size, rank)] if rank else [(spec.query_size, spec.hidden_size)]
    return [first, *queries]
