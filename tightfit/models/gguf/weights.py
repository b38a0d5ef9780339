"""The tensors of a GGUF file as the decoder's parameters, and back.

Names translate module by module. Three things differ beyond the name: llama.cpp rotates neighbouring rows where
Hugging Face and we rotate the halves of a head, so Llama's query and key rows are reordered (the other architectures'
are not); Gemma's norm weights are stored plus one; and some files stack query, key and value or gate and up in one
tensor. One tensor at a time is in memory beside the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tightfit.collectives.shards import copy_whole
from tightfit.errors import UserError
from tightfit.models.blank import whole_state
from tightfit.models.decoder import Decoder
from tightfit.models.gguf.config import architecture_of
from tightfit.models.gguf.file import GgufFile
from tightfit.models.spec import ModelSpec

OUTSIDE = {"embed": "token_embd", "positions": "position_embd", "norm": "output_norm", "head": "output"}
INSIDE = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate": "ffn_gate_exps",
    "mlp.experts.up": "ffn_up_exps",
    "mlp.experts.down": "ffn_down_exps",
    "mlp.shared.gate": "ffn_gate_shexp",
    "mlp.shared.up": "ffn_up_shexp",
    "mlp.shared.down": "ffn_down_shexp",
    "mlp.shared_gate": "ffn_gate_inp_shexp",
}
"""Our modules outside and inside a layer, and GGUF's."""
STACKS = {"attn_qkv": ("attention.q", "attention.k", "attention.v"), "ffn_up": ("mlp.gate", "mlp.up")}
"""Tensors that may hold several of our modules, one above the other."""
NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class Source:
    """The part of a stored tensor that one parameter comes from: its slices `start` to `stop`, or all of it."""

    tensor: str
    start: int = 0
    stop: int | None = None


def tensor_name(ours: str) -> str:
    """GGUF's name of our parameter: layers.3.attention.q.weight is blk.3.attn_q.weight."""
    block, module, kind = _split(ours)
    return f"{block}{(INSIDE if block else OUTSIDE)[module]}.{kind}"


def _split(ours: str) -> tuple[str, str, str]:
    """A parameter's block prefix, its module and whether it is a weight or a bias."""
    module, _, kind = ours.rpartition(".")
    if kind not in ("weight", "bias"):  # stacked experts are parameters, not modules
        module, kind = ours, "weight"
    if not module.startswith("layers."):
        return "", module, kind
    _, layer, module = module.split(".", 2)
    return f"blk.{layer}.", module, kind


def fill(model: Decoder, file: GgufFile) -> None:
    """Copy the file's tensors into `model`, once all of them are known to fit."""
    copy_tensors(model, file, matched(model, file))


def matched(model: Decoder, file: GgufFile) -> dict[str, Source]:
    """Where each parameter of `model` comes from, once all of them are known to fit."""
    state = {
        name: value for name, value in whole_state(model).items() if not (model.spec.tied and name == "head.weight")
    }
    sources = {name: _source(name, state, file) for name in state}
    spare = sorted(set(file.tensors) - {source.tensor for source in sources.values()} - set(NOT_WEIGHTS))
    if spare:
        raise UserError(f"{file.path} holds {spare[0]}, which a {model.spec.family} model of its shape does not have")
    return sources


@torch.no_grad()
def copy_tensors(model: Decoder, file: GgufFile, sources: Mapping[str, Source]) -> None:
    """Copy the file's tensors into the parameters of `model` that `sources` names."""
    state, interleaved = whole_state(model), architecture_of(file).interleaved
    for name, source in sources.items():
        parameter = state[name]
        if parameter.is_meta:  # another rank's
            continue
        stored = file.read(source.tensor, source.start, source.stop)
        values = ordered_rows(torch.from_numpy(stored), name, model.spec, interleaved)
        copy_whole(parameter, values.view(parameter.shape))


def _source(name: str, state: Mapping[str, Tensor], file: GgufFile) -> Source:
    """Where parameter `name` is stored; refused where it is missing or has another shape."""
    source, rows = _stacked(name, state, file) or (Source(tensor_name(name)), state[name].shape[0])
    stored, wanted = file.tensors.get(source.tensor), (rows, *state[name].shape[1:])
    if stored is None:
        raise UserError(f"{file.path} has no {source.tensor}, which its model cannot do without")
    if _core(stored.shape) != _core(wanted):
        raise UserError(
            f"{file.path} is damaged: {source.tensor} has shape {stored.shape} where its model has {wanted}"
        )
    return source


def _stacked(name: str, state: Mapping[str, Tensor], file: GgufFile) -> tuple[Source, int] | None:
    """The part of a stack that holds `name` and the height of the stack, where the file stacks."""
    block, module, kind = _split(name)
    for stack, parts in STACKS.items():
        alone = f"{block}{INSIDE[parts[0]]}.{kind}"
        if module not in parts or alone in file.tensors or f"{block}{stack}.{kind}" not in file.tensors:
            continue
        prefix = name.removesuffix(f"{module}.{kind}")
        members = [state.get(f"{prefix}{part}.{kind}") for part in parts]
        heights = [member.shape[0] for member in members if member is not None]
        if len(heights) == len(parts):  # a model without gate has an up projection all the same
            start = sum(heights[: parts.index(module)])
            return Source(f"{block}{stack}.{kind}", start, start + state[name].shape[0]), sum(heights)
    return None


def _core(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without leading ones: GGUF stores a matrix of one row as a vector."""
    return _core(shape[1:]) if len(shape) > 1 and shape[0] == 1 else tuple(shape)


def ordered_rows(values: Tensor, name: str, spec: ModelSpec, interleaved: bool) -> Tensor:
    """A stored tensor with its rows in the decoder's order, and Gemma's norm weights without the 1 that GGUF adds."""
    if interleaved and (heads := _rotated_heads(name, spec)):
        return values.unflatten(0, (heads, spec.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
    return values - 1 if spec.norm == "rms_plus_one" and "norm" in name else values


def _rotated_heads(name: str, spec: ModelSpec) -> int:
    """How many heads the rows of this parameter rotate; 0 for all but queries and keys."""
    return {"attention.q": spec.heads, "attention.k": spec.kv_heads}.get(_split(name)[1], 0)


def to_gguf(values: Tensor, name: str, spec: ModelSpec, interleaved: bool) -> NDArray[np.float32]:
    """Our parameter `name` as the float32 array that GGUF stores."""
    if interleaved and (heads := _rotated_heads(name, spec)):
        values = values.unflatten(0, (heads, 2, spec.head_dim // 2)).transpose(1, 2).flatten(0, 2)
    array: NDArray[np.float32] = values.detach().to("cpu", torch.float32).contiguous().numpy()
    return array + np.float32(1) if spec.norm == "rms_plus_one" and "norm" in name else array
