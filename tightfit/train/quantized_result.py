"""The compressed model that a run with fake-quantized weights ends in, in the layout that `compress` would choose.

The codes are those that the last evaluation computed with; weights without codes are written in float16.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tightfit.collectives.shards import whole
from tightfit.durable import discard_directory, durable_directory
from tightfit.levers.fake_quantize import coded_weights
from tightfit.models.decoder import Decoder
from tightfit.models.files.checksums import write_checksums
from tightfit.models.files.tensor_file import save_tensors
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.directory import module_schemes, tensors_to_write
from tightfit.models.quantized.formats.compressed_tensors import CompressedTensors
from tightfit.models.quantized.formats.own import Own
from tightfit.models.saving import write_config
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import Tokenizer

FOLDER = "quantized"
PLAIN_DTYPE = torch.float16


@dataclass(frozen=True)
class QuantizedParts:
    """All tensors of the model by name: quantized ones as codes, the others as they are."""

    coded: dict[str, CodedWeight | list[CodedWeight]]
    plain: dict[str, Tensor]


def quantized_parts(model: Decoder) -> QuantizedParts:
    """All tensors to write, unsharded; all ranks call this together, as ZeRO shards are all-gathered."""
    coded: dict[str, CodedWeight | list[CodedWeight]] = dict(coded_weights(model))
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in coded}
    if model.spec.tied:
        state.pop("head.weight", None)
    return QuantizedParts(coded, {name: whole(tensor.detach()) for name, tensor in state.items()})


def write_quantized(run: Path, spec: ModelSpec, parts: QuantizedParts, tokenizer: Tokenizer | None) -> Path:
    """Write the compressed model to `run`/quantized, in place of an earlier one, and return its path."""
    schemes = {name.removesuffix(".weight"): w.scheme for name, w in parts.coded.items() if isinstance(w, CodedWeight)}
    form = CompressedTensors()
    if any(form.refuse(scheme) for scheme in schemes.values()):
        form = Own()  # type: ignore[assignment]
    tensors = tensors_to_write(spec, parts.plain, parts.coded, form, PLAIN_DTYPE)
    target = run / FOLDER
    if target.exists():
        discard_directory(target)
    with durable_directory(target) as folder:
        write_config(folder, spec, tokenizer, PLAIN_DTYPE)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["quantization_config"] = form.config(*module_schemes(spec, schemes))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_tensors(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if tokenizer is not None:
            tokenizer.save(folder)
        write_checksums(folder)
    return target
