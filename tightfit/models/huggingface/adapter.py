"""LoRA adapters as PEFT writes them: a directory with adapter_config.json and adapter_model.safetensors.

    y = W x + scale · B (A x)        A [r, in], B [out, r], scale = alpha / r, or alpha / √r (rank-stabilised)

(Hu et al. 2021). Matrices get the names of the decoder's modules; where a Hugging Face module holds several of those,
they share A and each gets its rows of B. Files are untrusted: names, shapes and dtypes are checked before tensors are
read, nothing is unpickled. Refused: what is more than A and B on a layer's projections (DoRA, biases, whole modules,
embeddings, the output projection, experts); such adapters can be merged into their model.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.adapter_config import LARGEST_RANK, MERGE, PREFIX, read_adapter_config, scale_of
from tightfit.models.huggingface.families import FAMILIES
from tightfit.models.huggingface.weight_names import TensorMap, tensor_maps
from tightfit.models.spec import ModelSpec

WEIGHTS_FILE = "adapter_model.safetensors"
NAME = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one projection: down [r, in] and up [out, r], the scale in `up`."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True)
class Adapter:
    """An adapter's matrices by the names of the decoder's modules."""

    source: str
    rank: int
    """The largest rank of its matrices."""
    changes: Mapping[str, LowRank]

    @property
    def bytes(self) -> int:
        """Bytes of its matrices; a `down` that several projections share counts once."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def to(self, dtype: torch.dtype) -> "Adapter":
        """This adapter in another dtype."""
        tensors = {key: tensor.to(dtype) for key, tensor in self._tensors().items()}
        changes = {name: LowRank(tensors[id(each.down)], tensors[id(each.up)]) for name, each in self.changes.items()}
        return Adapter(self.source, self.rank, changes)

    def _tensors(self) -> dict[int, Tensor]:
        return {id(tensor): tensor for each in self.changes.values() for tensor in (each.down, each.up)}


def load_adapter(directory: Path, model: Decoder, dtype: torch.dtype | None = None) -> Adapter:
    """The adapter in `directory`, in `dtype` or that of `model`, on the device of `model`."""
    config, weight = read_adapter_config(directory), next(model.parameters())
    shapes = _shapes(model.spec)
    changes: dict[str, LowRank] = {}
    rank = 0
    with _reading(directory / WEIGHTS_FILE) as tensors:
        found = _matrices(tensors, model.spec, shapes, directory)
        for module, (mapping, names) in found.items():
            down, up = (tensors.get_tensor(names[matrix]).float() for matrix in "AB")
            rank = max(rank, down.shape[0])
            up = up * scale_of(config, module, down.shape[0], directory)
            target = {"device": weight.device, "dtype": dtype or weight.dtype}
            down, row = down.to(**target), 0
            for ours in mapping.ours:
                name, size = ours.removesuffix(".weight"), shapes[ours][0]
                changes[name] = LowRank(down, up[row : row + size].to(**target).contiguous())
                row += size
    return Adapter(str(directory), rank, changes)


def _reading(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; save the adapter with safe_serialization") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); it may be cut short, copy it again") from None


def _shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Shapes of all parameters of a plain decoder, whatever form a loaded model has them in."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Decoder(spec).state_dict().items()}


def _matrices(
    tensors: Any, spec: ModelSpec, shapes: Mapping[str, torch.Size], directory: Path
) -> dict[str, tuple[TensorMap, dict[str, str]]]:
    """Hugging Face modules with their map and the names of A and B; refused where the file has any other tensor."""
    maps = {mapping.theirs.removesuffix(".weight"): mapping for mapping in _projections(spec, shapes)}
    found: dict[str, tuple[TensorMap, dict[str, str]]] = {}
    for name in tensors.keys():  # noqa: SIM118 (it is no dict)
        match = NAME.fullmatch(name.removeprefix(PREFIX))
        module = _canonical(match["module"], spec) if match else ""
        if match is None or module not in maps:
            raise UserError(f"{directory} changes {name}, which is no projection of this model's layers; {MERGE}")
        found.setdefault(module, (maps[module], {}))[1][match["matrix"]] = name
    if not found:
        raise UserError(f"{directory / WEIGHTS_FILE} has no matrices; train the adapter first")
    for module, (mapping, names) in found.items():
        _check(tensors, names, mapping, shapes, f"{module} in {directory}")
    return found


def _projections(spec: ModelSpec, shapes: Mapping[str, torch.Size]) -> Iterator[TensorMap]:
    """Maps of the layers' matrices that are modules (no norms, no stacked experts)."""
    names = [name for name in shapes if not (spec.tied and name == "head.weight")]
    experts = spec.experts.count if spec.experts else 0
    for mapping in tensor_maps(FAMILIES[spec.family].weights, names, spec.layers, experts):
        inside = mapping.ours[0].startswith("layers.") and mapping.ours[0].endswith(".weight")
        if inside and mapping.expert is None and "norm" not in mapping.ours[0]:
            yield mapping


def _canonical(module: str, spec: ModelSpec) -> str:
    """The module's name in the family's causal LM, also where a file has it as the base class does (`layers.0. …`)."""
    prefixes = FAMILIES[spec.family].prefixes
    before, instead = next(((a, b) for a, b in prefixes if module.startswith(a)), ("", ""))
    return instead + module.removeprefix(before)


def _check(
    tensors: Any, names: dict[str, str], mapping: TensorMap, shapes: Mapping[str, torch.Size], what: str
) -> None:
    if missing := {"A", "B"} - names.keys():
        raise UserError(f"{what} has no lora_{missing.pop()}; save the adapter again")
    slices = {matrix: tensors.get_slice(name) for matrix, name in names.items()}
    for matrix, each in slices.items():
        if each.get_dtype() not in DTYPES:
            raise UserError(f"lora_{matrix} of {what} is {each.get_dtype()}; adapters are {', '.join(DTYPES)}")
    down, up = (list(slices[matrix].get_shape()) for matrix in "AB")
    inside, outside = shapes[mapping.ours[0]][1], sum(shapes[ours][0] for ours in mapping.ours)
    rank = down[0] if len(down) == 2 else 0
    if not 1 <= rank <= LARGEST_RANK or down != [rank, inside] or up != [outside, rank]:
        raise UserError(
            f"{what} has matrices {down} and {up}, but this model's projection is {outside} x {inside} and ranks go to "
            f"{LARGEST_RANK}; give an adapter of this model"
        )
