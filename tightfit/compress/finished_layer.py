"""A layer as its file holds it, to carry calibration rows through after a resumption."""

from typing import Any

import torch

from tightfit.compress.working_directory import WorkingDirectory
from tightfit.models.blank import blank_decoder
from tightfit.models.decoder import Decoder
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.directory import replace_module, written_links
from tightfit.models.quantized.formats.format import FileFormat
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.spec import ModelSpec
from tightfit.parallel.pipeline_stage import Piece, keep_only


@torch.no_grad()
def load_finished(
    directory: WorkingDirectory,
    number: int,
    index: int,
    spec: ModelSpec,
    form: FileFormat,
    config: Any,
    device: torch.device,
) -> Decoder:
    """A decoder with layer `index` only, from shard `number`."""
    tensors = directory.tensors(number)
    model = blank_decoder(spec, "meta", torch.float32)
    keep_only(model, [Piece(1, 3, index, index + 1)])
    model.to_empty(device=device)
    state = model.state_dict()
    for link in written_links(spec, state):
        if link.theirs in tensors and not any(
            f"{link.theirs.removesuffix('.weight')}.{m}" in tensors for m in form.marks
        ):
            whole = (
                tensors[link.theirs].T if link.transposed and tensors[link.theirs].ndim == 2 else tensors[link.theirs]
            )
            for ours, part in zip(
                link.ours, whole.split([state[o].shape[link.expert is not None] for o in link.ours]), strict=True
            ):
                (state[ours] if link.expert is None else state[ours][link.expert]).copy_(part)
            continue
        module = link.theirs.removesuffix(".weight")
        own = {s: tensors[f"{module}.{s}"] for s in form.suffixes if f"{module}.{s}" in tensors}
        weight, start = form.decode(own, form.scheme(config, module), module), 0
        for ours in link.ours:
            count = state[ours].shape[-2]
            part = weight if len(link.ours) == 1 else weight.rows(start, start + count)
            _put(model, ours, part.to(device), state, link.expert)
            start += count
    return model


def _put(model: Decoder, ours: str, weight: CodedWeight, state: dict[str, torch.Tensor], expert: int | None) -> None:
    if weight.scheme.activations is None:
        (state[ours] if expert is None else state[ours][expert]).copy_(weight.dequantize())
        return
    bias = state.get(f"{ours.removesuffix('.weight')}.bias")
    replace_module(model, ours, QuantizedLinear(weight, bias))
