"""Models whose linear layers are two: W ≈ B A with A [rank, inputs] and B [outputs, rank], in a directory of their own.

config.json says the rank of every such module under `low_rank`, by Hugging Face's names; files hold `NAME.0.weight`
(A) and `NAME.1.weight` (B). Beside them lies a short modelling file of ours that puts two linear layers where the
family has one, so transformers loads the directory with `trust_remote_code=True`. (Adapters over a base of zeros would
need no code, but store and multiply the zeros.) Our loader never runs that file. Families whose files stack or
transpose matrices, and experts, are not factored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.collectives.shards import copy_whole
from tightfit.errors import UserError
from tightfit.models.blank import blank_decoder, whole_state
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface import weights as plain_files
from tightfit.models.huggingface.families import FAMILIES
from tightfit.models.huggingface.weight_names import TensorMap
from tightfit.models.quantized.directory import replace_module, shapes_of, written_links
from tightfit.models.resolve import read_config
from tightfit.models.spec import ModelSpec

MODELLING_FILE = "modeling_low_rank.py"
CLASS = "LowRankForCausalLM"
MODELLING = '''"""A {architecture} whose linear layers in config.low_rank are two: inputs to rank, rank to outputs."""

from torch import nn
from transformers import {architecture}


class LowRankForCausalLM({architecture}):
    """The same model with some of its linear layers factored."""

    def __init__(self, config):
        super().__init__(config)
        for name, rank in config.low_rank.items():
            parent, _, own = name.rpartition(".")
            holder = self.get_submodule(parent)
            dense = getattr(holder, own)
            first = nn.Linear(dense.in_features, rank, bias=False)
            second = nn.Linear(rank, dense.out_features, bias=dense.bias is not None)
            setattr(holder, own, nn.Sequential(first, second))
'''


class LowRankLinear(nn.Module):
    """y = (x Aᵀ) Bᵀ + b."""

    def __init__(self, inputs: int, outputs: int, rank: int, *, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rank = inputs, outputs, rank
        self.first = nn.Parameter(torch.empty(rank, inputs))
        self.second = nn.Parameter(torch.empty(outputs, rank))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.first), self.second, self.bias)


def is_low_rank(directory: Path) -> bool:
    """Whether the config.json in `directory` says that linear layers are factored."""
    config = read_config(directory / "config.json")
    return isinstance(config, dict) and "low_rank" in config


def low_rank_config(config: Mapping[str, Any], ranks: Mapping[str, int]) -> dict[str, Any]:
    """`config` for modules of these ranks, by Hugging Face's names."""
    stem = MODELLING_FILE.removesuffix(".py")
    return {**config, "low_rank": dict(ranks), "auto_map": {"AutoModelForCausalLM": f"{stem}.{CLASS}"}}


def modelling_code(spec: ModelSpec) -> str:
    """The modelling file for models of this family."""
    return MODELLING.format(architecture=FAMILIES[spec.family].architecture)


def factored_names(spec: ModelSpec) -> dict[str, str]:
    """Hugging Face's module of every matrix of the layers, by our name; those that cannot be factored are left out."""
    shapes = shapes_of(spec)
    return {
        link.ours[0].removesuffix(".weight"): link.theirs.removesuffix(".weight")
        for link in written_links(spec, shapes)
        if _is_matrix(link, shapes)
    }


def _is_matrix(link: TensorMap, shapes: Mapping[str, Tensor]) -> bool:
    plain = len(link.ours) == 1 and not link.transposed and link.expert is None
    inside = plain and link.ours[0].startswith("layers.") and link.ours[0].endswith(".weight")
    return inside and shapes[link.ours[0]].ndim == 2 and ".router" not in link.ours[0]


class LowRankDirectory:
    """The files of a factored model, whose names and shapes are checked against the model's."""

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        self.path, self.shapes = directory, shapes_of(spec)
        self.ours = {theirs: ours for ours, theirs in factored_names(spec).items()}
        self.ranks = self._ranks(read_config(directory / "config.json").get("low_rank"))
        self._file_of = {name: path for path, names in plain_files._files(directory).items() for name in names}
        self.maps = plain_files._match(self._collapsed(), self.shapes, spec, str(directory))
        plain_files.require_tied(self._file_of, self.maps, spec)

    def _ranks(self, given: Any) -> dict[str, int]:
        if not isinstance(given, dict) or not given:
            raise UserError(f"low_rank in {self.path}/config.json is {given!r}; it must name modules and their ranks")
        for module, rank in given.items():
            most = min(self.shapes[f"{self.ours[module]}.weight"].shape) if module in self.ours else 0
            if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= most:
                raise UserError(
                    f"low_rank in {self.path}/config.json says {module}: {rank!r}; no such layer can have it"
                )
        return given

    def _collapsed(self) -> list[str]:
        """The names that an unfactored model of the same modules would have."""
        found = []
        for name in self._file_of:
            module, _, ending = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
            if module not in self.ranks:
                found.append(name)
            elif ending == "1":
                found.append(f"{module}.{name.rpartition('.')[2]}")
        return found

    def factors(self, module: str) -> tuple[Tensor, Tensor]:
        """A and B of a module."""
        outputs, inputs = self.shapes[f"{self.ours[module]}.weight"].shape
        rank = self.ranks[module]
        return self._read(f"{module}.0.weight", (rank, inputs)), self._read(f"{module}.1.weight", (outputs, rank))

    def plain(self, link: TensorMap, name: str) -> Tensor:
        """An unfactored tensor; the bias of a factored module lies with its second layer."""
        module, _, kind = name.rpartition(".")
        stored = f"{module}.1.bias" if module in self.ranks and kind == "bias" else name
        return self._read(stored, plain_files._shape(link, self.shapes))

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        path = self._file_of.get(name)
        if path is None:
            raise UserError(f"{self.path} misses {name}, which low_rank in its config.json says it has")
        with plain_files._reading(path) as tensors:
            plain_files._check_dtype(tensors.get_slice(name).get_dtype(), name, path)
            tensor: Tensor = tensors.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise UserError(f"{name} in {path} has shape {tuple(tensor.shape)} where config.json says {shape}")
        return tensor


@torch.no_grad()
def load_low_rank(directory: Path, spec: ModelSpec, device: str | torch.device, dtype: torch.dtype) -> Decoder:
    """The decoder in `directory`, its factored layers as two."""
    files = LowRankDirectory(directory, spec)
    model = blank_decoder(spec, "meta", dtype)
    with torch.device("meta"):
        for module, rank in files.ranks.items():
            ours = f"{files.ours[module]}.weight"
            outputs, inputs = files.shapes[ours].shape
            has_bias = f"{files.ours[module]}.bias" in files.shapes
            replace_module(model, ours, LowRankLinear(inputs, outputs, rank, bias=has_bias).to(dtype))
    model.to_empty(device=device)
    if spec.tied:
        model.head.weight = model.embed.weight
    state = model.state_dict()
    for link, name in files.maps:
        module = name.removesuffix(".weight")
        if module in files.ranks and name.endswith(".weight"):
            first, second = files.factors(module)
            state[f"{files.ours[module]}.first"].copy_(first)
            state[f"{files.ours[module]}.second"].copy_(second)
        else:
            plain_files._place(link, files.plain(link, name), state)
    return model


@torch.no_grad()
def fill_multiplied(model: Decoder, directory: Path) -> None:
    """Copy the products of the factors into an ordinary decoder, to train it or write it elsewhere."""
    files = LowRankDirectory(directory, model.spec)
    state = whole_state(model)
    for link, name in files.maps:
        if all(state[ours].is_meta for ours in link.ours):
            continue
        module = name.removesuffix(".weight")
        if module in files.ranks and name.endswith(".weight"):
            first, second = files.factors(module)
            copy_whole(state[link.ours[0]], second.float() @ first.float(), None)
        else:
            plain_files._place(link, files.plain(link, name), state)
