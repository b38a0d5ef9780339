"""Models of transformers as GGUF files, made the way llama.cpp's converter makes them and independently of ours.

Names come from the gguf package's own map; what the converter does to values is done here from its description:
Llama's query and key rows are interleaved, Gemma's norms get one added, GPT-2's matrices are turned over, experts are
stacked. llama.cpp running these files, with the same results as transformers, is what says that this is right.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from tests.models.huggingface.reference import as_stored
from tightfit.models.spec import ModelSpec

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt2": "gpt2",
}
Extra = Callable[[gguf.GGUFWriter], None]
TURNED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def convert(
    theirs: torch.nn.Module, spec: ModelSpec, path: Path, extra: Extra | None = None, vocabulary: Extra | None = None
) -> None:
    """Write the transformers model `theirs`, whose shape is `spec`, to `path`; `extra` adds to it."""
    name = ARCHITECTURES[spec.family]
    writer = gguf.GGUFWriter(path, name)
    _describe(writer, spec, name)
    if vocabulary is None:
        _vocabulary(writer, spec.vocab_size)
    for add in (vocabulary, extra):
        if add is not None:
            add(writer)
    for tensor_name, values in _tensors(theirs, spec, name).items():
        writer.add_tensor(tensor_name, np.ascontiguousarray(values.numpy().astype(np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, spec: ModelSpec, name: str) -> None:
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.mlp_size)
    writer.add_head_count(spec.heads)
    if spec.norm == "layer":
        writer.add_layer_norm_eps(spec.norm_eps)
        return
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_rope_dimension_count(int(spec.head_dim * spec.rope.rotated_share))
    if spec.head_dim * spec.heads != spec.hidden_size or name.startswith(("gemma", "qwen3")):
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
    if name.startswith(("gemma", "phi3")) and name != "gemma":
        writer.add_sliding_window(spec.window or 0)
    if spec.attention_softcap is not None:
        writer.add_attn_logit_softcapping(spec.attention_softcap)
    if spec.logit_softcap is not None:
        writer.add_final_logit_softcapping(spec.logit_softcap)
    if spec.experts is not None:
        writer.add_expert_count(spec.experts.count)
        writer.add_expert_used_count(spec.experts.per_token)
        if name != "llama":
            writer.add_expert_feed_forward_length(spec.experts.mlp_size)
        if spec.experts.shared_size:
            writer.add_expert_shared_feed_forward_length(spec.experts.shared_size)


def _vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """As many tokens as the model has, of which the first two matter to nobody but the loader."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = ["a", "b", "ab", "Ċ"] + [f"token{index}" for index in range(4, size)]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * size)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def _tensors(theirs: torch.nn.Module, spec: ModelSpec, name: str) -> dict[str, Tensor]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], spec.layers)
    made: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for hf, values in as_stored(theirs).items():
        if spec.tied and hf == "lm_head.weight":
            continue
        if ".experts." in hf:
            before, number, part = _expert(hf)
            experts[f"{before}.experts.{part}"][number] = values
            continue
        renamed = names.get_name(hf, try_suffixes=(".weight", ".bias"))
        assert renamed is not None, hf
        made[renamed] = _value(hf, values, spec, name)
    for hf, parts in experts.items():
        stacked = torch.stack([parts[number] for number in sorted(parts)])
        renamed = names.get_name(hf, try_suffixes=(".weight",))
        assert renamed is not None, hf
        made[renamed] = stacked
    return made


def _expert(hf: str) -> tuple[str, int, str]:
    """model.layers.0.mlp.experts.3.up_proj.weight in its three parts."""
    before, after = hf.split(".experts.")
    number, part = after.split(".", 1)
    return before, int(number), part


def _value(hf: str, values: Tensor, spec: ModelSpec, name: str) -> Tensor:
    if name.startswith("gemma") and hf.endswith("norm.weight"):
        return values + 1
    if name == "gpt2" and hf.endswith(TURNED):
        return values.T
    if name == "llama" and ("q_proj" in hf or "k_proj" in hf):
        heads = spec.heads if "q_proj" in hf else spec.kv_heads
        halves = values.reshape(heads, 2, spec.head_dim // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    if hf.endswith("shared_expert_gate.weight"):
        return values.squeeze()
    return values
