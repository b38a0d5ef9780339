"""Loading a layer that has been written already, to send calibration rows through it when a run is resumed."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tightfit.models.blank import blank_decoder
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface import weights as plain_files
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.directory import replace_module, written_links
from tightfit.models.quantized.formats.format import FileFormat
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.spec import ModelSpec
from tightfit.parallel.pipeline_stage import StageSpan, drop_other_stages


@torch.no_grad()
def load_finished(
    tensors: Mapping[str, Tensor],
    index: int,
    spec: ModelSpec,
    form: FileFormat,
    config: Mapping[str, Any],
    device: torch.device,
) -> Decoder:
    """A decoder with layer `index` only, from the `tensors` of its file."""
    model = blank_decoder(spec, "meta", torch.float32)
    drop_other_stages(model, [StageSpan(1, 3, index, index + 1)])
    model.to_empty(device=device)
    state = model.state_dict()
    for link in written_links(spec, state):
        module = link.theirs.removesuffix(".weight")
        if not any(f"{module}.{mark}" in tensors for mark in form.marks):
            plain_files._place(link, tensors[link.theirs], state)
            continue
        own = {s: tensors[f"{module}.{s}"] for s in form.suffixes if f"{module}.{s}" in tensors}
        weight, start = form.decode(own, form.scheme(config, module), module), 0
        for ours in link.ours:
            count = state[ours].shape[-2]
            part = weight if len(link.ours) == 1 else weight.rows(start, start + count)
            _put(model, ours, part.to(device), state, link.expert)
            start += count
    return model


def _put(model: Decoder, ours: str, weight: CodedWeight, state: Mapping[str, Tensor], expert: int | None) -> None:
    if weight.scheme.activations is None:
        (state[ours] if expert is None else state[ours][expert]).copy_(weight.dequantize())
        return
    bias = state.get(f"{ours.removesuffix('.weight')}.bias")
    replace_module(model, ours, QuantizedLinear(weight, bias))
