"""A trained adapter on disk: a PEFT directory that also names the model it was trained on, so it loads as a model.

    adapter_config.json  adapter_model.safetensors     A and B as PEFT has them
    base.json                                          the frozen model: where it is, a digest of it, how it was held
    config.json  tokenizer.json …                      its shape and tokenizer

PEFT and `tightfit serve --adapter` read the first two. `load_model` reads all: the frozen model as it was held in
training. The adapter's product B A is added to plain weights; packed ones keep the adapter as a branch beside them.
Where a Hugging Face module holds several of tightfit's (Phi-3's qkv), their A's are stacked and B is block-diagonal,
with a rank and an alpha of its own.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from tightfit.models.base_model import BASE_FILE, FORMAT, BaseModel
from tightfit.models.decoder import Decoder
from tightfit.models.files.checksums import digest
from tightfit.models.files.tensor_file import save_tensors
from tightfit.models.huggingface.adapter import (
    WEIGHTS_FILE,
    _matrices,
    _projections,
    _reading,
    _shapes,
    load_adapter,
)
from tightfit.models.huggingface.adapter_config import CONFIG_FILE, PREFIX
from tightfit.models.huggingface.weight_names import TensorMap
from tightfit.models.layers.linear_plus_adapter import LinearPlusAdapter
from tightfit.models.quantized.directory import replace_module
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.spec import ModelSpec

Matrices = Mapping[str, tuple[Tensor, Tensor]]
"""A and B by the decoder's module name."""


def weights_digest(path: Path) -> str:
    """A digest of the model in a file or directory: of its weight files, and of an adapter's base.json."""
    patterns = ("*.safetensors", "sharded/*.distcp", BASE_FILE)
    files = [path] if path.is_file() else sorted(found for each in patterns for found in path.glob(each))
    hashed = hashlib.sha256()
    for file in files:
        hashed.update(f"{file.name} {digest(file)}\n".encode())
    return hashed.hexdigest()


def write_adapter(
    folder: Path, spec: ModelSpec, matrices: Matrices, base: BaseModel, *, rank: int, alpha: float, dropout: float
) -> None:
    """Write adapter_config.json, adapter_model.safetensors and base.json into an existing directory."""
    tensors: dict[str, Tensor] = {}
    targets: dict[str, int] = {}
    transposed = False
    for mapping, own in _adapted_modules(spec, matrices):
        module = mapping.theirs.removesuffix(".weight")
        a, b = _joined(mapping, own, matrices, spec)
        for matrix, tensor in (("A", a), ("B", b)):
            tensors[f"{PREFIX}{module}.lora_{matrix}.weight"] = tensor.detach().to("cpu").contiguous()
        targets[_inside_layer(module)] = len(own)
        transposed = transposed or mapping.transposed
    several = {name: count for name, count in targets.items() if count > 1}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.source,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": sorted(targets),
        "rank_pattern": {name: count * rank for name, count in several.items()},
        "alpha_pattern": {name: count * alpha for name, count in several.items()},
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_tensors(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / BASE_FILE).write_text(json.dumps({"format": FORMAT, **asdict(base)}, indent=1) + "\n", encoding="utf-8")


def _adapted_modules(spec: ModelSpec, names: Iterable[str]) -> Iterator[tuple[TensorMap, list[str]]]:
    """Maps of Hugging Face modules that have an adapter, each with those of the decoder's modules in it that do."""
    wanted = set(names)
    for mapping in _projections(spec, _shapes(spec)):
        own = [name for ours in mapping.ours if (name := ours.removesuffix(".weight")) in wanted]
        if own:
            yield mapping, own


def _inside_layer(module: str) -> str:
    """`self_attn.q_proj` of `model.layers.3.self_attn.q_proj`."""
    parts = module.split(".")
    number = next(index for index, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[number + 1 :])


def _joined(mapping: TensorMap, own: list[str], matrices: Matrices, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """A and B of a Hugging Face module: the A's of the decoder's modules in it stacked, their B's as a diagonal."""
    if len(mapping.ours) == 1:
        return matrices[own[0]]
    shapes = _shapes(spec)
    a = torch.cat([matrices[name][0] for name in own])
    rank = len(a) // len(own)
    blocks = []
    for ours in mapping.ours:
        name, rows = ours.removesuffix(".weight"), shapes[ours][0]
        block = a.new_zeros(rows, len(a))
        if name in own:
            first = own.index(name) * rank
            block[:, first : first + rank] = matrices[name][1]
        blocks.append(block)
    return a, torch.cat(blocks)


def read_matrices(folder: Path, spec: ModelSpec, names: Iterable[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of the decoder's modules `names`, as `write_adapter` was given them."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    shapes = _shapes(spec)
    with _reading(folder / WEIGHTS_FILE) as tensors:
        stored = _matrices(tensors, spec, shapes, folder)
        for mapping, own in _adapted_modules(spec, names):
            module = mapping.theirs.removesuffix(".weight")
            if module not in stored:
                continue
            a, b = (tensors.get_tensor(stored[module][1][matrix]) for matrix in "AB")
            row, rank = 0, len(a) // len(own)
            for ours in mapping.ours:
                name, rows = ours.removesuffix(".weight"), shapes[ours][0]
                if name in own:
                    first = own.index(name) * rank
                    found[name] = a[first : first + rank], b[row : row + rows, first : first + rank]
                row += rows
    return found


@torch.no_grad()
def add_adapter(model: Decoder, folder: Path) -> None:
    """Add the adapter in `folder` to `model`, which has the weights it was trained on.

    Plain weights get B A added, in float32; packed layers become a `LinearPlusAdapter`.
    """
    wide = load_adapter(folder, model, torch.float32)
    narrow = wide.to(next(model.parameters()).dtype)
    layers = dict(model.named_modules())
    for name, change in wide.changes.items():
        layer = layers.get(name)
        if isinstance(layer, QuantizedLinear):
            replace_module(model, f"{name}.weight", LinearPlusAdapter(layer, narrow.changes[name]))
        elif layer is not None:  # None: another pipeline rank has it
            assert isinstance(layer, torch.nn.Linear)
            layer.weight.copy_(layer.weight.float().addmm(change.up, change.down))
