"""Weights on disk: bit-for-bit exchange with transformers in both directions, and other layouts of the same weights."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.covering import sampled
from tests.models.huggingface.reference import CASES, as_stored, fill, pair
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.config import config_from_spec, spec_from_config
from tightfit.models.huggingface.weights import load_weights, save_weights, to_hf_state
from tightfit.models.quantized.directory import is_quantized

EXCHANGED = [
    "llama",
    "llama-biases",
    "llama-tied-wide-heads",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3-partial",
    "gpt2",
    "gpt2-untied",
]
every_family = pytest.mark.parametrize("name", EXCHANGED)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def saved(name: str, directory: Path, **options: Any) -> Decoder:
    """Our weights and config of the case `name` in `directory`."""
    ours = deepcopy(pair(name).ours)
    save_weights(ours, directory, **options)
    dtype = options.get("dtype", torch.float32)
    config = config_from_spec(ours.spec, dtype=str(dtype).removeprefix("torch."))
    (directory / "config.json").write_text(json.dumps(config))
    return ours


@sampled(3)
@dtypes
@every_family
def test_transformers_saves_and_we_load(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = deepcopy(pair(name).theirs).to(dtype)
    theirs.save_pretrained(tmp_path)
    ours = Decoder(pair(name).ours.spec).to(dtype)
    load_weights(ours, tmp_path)
    same(to_hf_state(ours, ours.spec), stored(tmp_path))
    same(to_hf_state(ours, ours.spec), as_stored(theirs))


@sampled(3)
@dtypes
@every_family
def test_we_save_and_transformers_loads(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    ours = saved(name, tmp_path, dtype=dtype).to(dtype)
    theirs, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values()), told
    assert theirs.dtype == dtype
    same(as_stored(theirs), to_hf_state(ours, ours.spec))


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_our_files_have_the_names_of_theirs(name: str, tmp_path: Path) -> None:
    pair(name).theirs.save_pretrained(tmp_path / "theirs")
    save_weights(pair(name).ours, tmp_path / "ours")
    same(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))


@pytest.mark.parametrize("name", ["qwen2_moe", "gemma2"])
def test_shards(name: str, tmp_path: Path) -> None:
    ours = saved(name, tmp_path, max_shard_bytes=30_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert set(index["weight_map"].values()) == {path.name for path in files}
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in stored(tmp_path).values())
    for path in files:
        held = load_file(path)
        assert sum(t.numel() * 4 for t in held.values()) <= 30_000
        assert all(index["weight_map"][tensor] == path.name for tensor in held)
    same(as_stored(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)), to_hf_state(ours, ours.spec))
    again = Decoder(ours.spec)
    load_weights(again, tmp_path)
    same(again.state_dict(), ours.state_dict())


def test_shards_of_transformers(tmp_path: Path) -> None:
    pair("mistral").theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    ours = Decoder(pair("mistral").ours.spec)
    load_weights(ours, tmp_path)
    same(ours.state_dict(), pair("mistral").ours.state_dict())


def test_saving_again_leaves_nothing_of_the_former_files(tmp_path: Path) -> None:
    saved("llama", tmp_path, max_shard_bytes=20_000)
    saved("llama", tmp_path)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    saved("llama", tmp_path, max_shard_bytes=20_000)
    assert not (tmp_path / "model.safetensors").exists()


@every_family
def test_memory_mapping_there_and_back(name: str) -> None:
    ours = pair(name).ours
    again = Decoder(ours.spec)
    fill(again, to_hf_state(ours, ours.spec))
    same(again.state_dict(), ours.state_dict())


def test_renamed_tensors_are_views() -> None:
    ours: Any = pair("llama").ours
    assert to_hf_state(ours, ours.spec)["model.norm.weight"].data_ptr() == ours.norm.weight.data_ptr()


@pytest.mark.parametrize(("wide", "narrow"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_dtype_on_disk_is_cast_to_the_model_s(wide: torch.dtype, narrow: torch.dtype, tmp_path: Path) -> None:
    ours = saved("phi3", tmp_path, dtype=wide).to(wide)
    model = Decoder(ours.spec).to(narrow)
    load_weights(model, tmp_path)
    same(model.state_dict(), {name: tensor.to(narrow) for name, tensor in ours.state_dict().items()})


OTHER_LAYOUTS: dict[str, tuple[str, Callable[[str], str], dict[str, tuple[int, ...]]]] = {
    "gpt2-without-prefix": ("gpt2", lambda n: n.removeprefix("transformer."), {"h.0.attn.bias": (1, 1, 8, 8)}),
    "gpt2-buffers": ("gpt2", lambda n: n, {"transformer.h.1.attn.masked_bias": ()}),
    "llama-base-model": ("llama-tied-wide-heads", lambda n: n.removeprefix("model."), {}),
    "llama-inv-freq": ("llama", lambda n: n, {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}),
    "gemma3-old": (
        "gemma3",
        lambda n: f"language_model.{n}",
        {"vision_tower.vision_model.embeddings.x": (3,), "multi_modal_projector.mm_input_projection_weight": (2, 2)},
    ),
    "gemma3-new": (
        "gemma3",
        lambda n: n.replace("model.", "model.language_model."),
        {"model.vision_tower.vision_model.embeddings.x": (3,)},
    ),
}


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_other_layouts_of_the_same_weights(layout: str, tmp_path: Path) -> None:
    name, rename, extra = OTHER_LAYOUTS[layout]
    ours = pair(name).ours
    renamed = {rename(n): tensor.clone() for n, tensor in to_hf_state(ours, ours.spec).items()}
    save_file(renamed | {n: torch.zeros(shape) for n, shape in extra.items()}, tmp_path / "model.safetensors")
    model = Decoder(ours.spec)
    load_weights(model, tmp_path)
    same(model.state_dict(), ours.state_dict())


@pytest.mark.parametrize(("name", "prefix"), [("qwen2", ""), ("gemma3", "language_model.")])
def test_a_tied_projection_that_is_stored_too_must_be_the_embedding(name: str, prefix: str, tmp_path: Path) -> None:
    ours = pair(name).ours
    weights = {f"{prefix}{n}": tensor.clone() for n, tensor in to_hf_state(ours, ours.spec).items()}
    head = f"{prefix}lm_head.weight"
    embedding = weights[f"{prefix}model.embed_tokens.weight"]
    save_file(weights | {head: embedding.clone()}, tmp_path / "model.safetensors")
    model = Decoder(ours.spec)
    load_weights(model, tmp_path)
    same(model.state_dict(), ours.state_dict())
    for other in (2 * embedding, embedding[1:].clone()):
        save_file(weights | {head: other}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=f"{head} in .* is not {prefix}model.embed_tokens.weight, to which config"):
            load_weights(Decoder(ours.spec), tmp_path)


def test_mxfp4_is_read_as_transformers_unpacks_it(tmp_path: Path) -> None:
    """Blocks and scales of experts, in two files; every code and many scales occur."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = CASES["gpt_oss"] | {"hidden_size": 64, "intermediate_size": 32}
    spec = spec_from_config(config, "packed")
    torch.manual_seed(0)
    state = to_hf_state(Decoder(spec).state_dict(), spec)
    packed: dict[str, torch.Tensor] = {}
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = state.pop(name).shape
        packed[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        packed[f"{name}_scales"] = torch.randint(110, 130, (experts, rows, columns // 32), dtype=torch.uint8)
    blocks = {name: tensor for name, tensor in packed.items() if name.endswith("_blocks")}
    scales = {name: tensor for name, tensor in packed.items() if name.endswith("_scales")}
    files = {"model-00001-of-00002.safetensors": state | blocks, "model-00002-of-00002.safetensors": scales}
    for file, tensors in files.items():
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / file)
    index = {"weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    quantized = {**config_from_spec(spec, dtype="bfloat16"), "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    assert not is_quantized(tmp_path)
    model = Decoder(spec)
    load_weights(model, tmp_path)
    found = to_hf_state(model, spec)
    for name, tensor in blocks.items():
        whole = name.removesuffix("_blocks")
        wanted = convert_moe_packed_tensors(tensor, scales[f"{whole}_scales"], dtype=torch.float32)
        assert torch.equal(found[whole], wanted), whole
    save_file({**scales, next(iter(scales)): torch.zeros(3, dtype=torch.uint8)}, tmp_path / list(files)[1])
    with pytest.raises(UserError, match="is not MXFP4"):
        load_weights(Decoder(spec), tmp_path)
