"""Presets against the published parameter counts and against the model transformers builds from them."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.covering import sampled
from tightfit.errors import UserError
from tightfit.models.huggingface.config import config_from_spec
from tightfit.models.presets import PRESETS, preset, preset_names
from tightfit.models.resolve import resolve_spec

# Totals shown on the models' pages on huggingface.co (the sum over their safetensors files, output projections that are
# tied to the embedding counted once), and in the reports of Llama 3, Qwen2.5, Qwen3, Gemma 2, Gemma 3, Phi-3 and Phi-4.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-3-mini-128k": 3_821_079_552,
    "phi-3-medium-4k": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}
# Gemma 3 from 4B on is published with an image encoder (416 866 032 parameters) and a projection into the text model
# (a norm of 1152 and a matrix of 1152 by the text model's width).
PUBLISHED_WITH_IMAGES = {
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
}
BILLIONS_PER_TOKEN = {"mixtral-8x7b": 12.9, "qwen3-30b-a3b": 3.35, "qwen3-235b-a22b": 22.2}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name: str) -> None:
    assert preset(name).params() == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED_WITH_IMAGES)
def test_published_totals_with_images(name: str) -> None:
    spec = preset(name)
    assert spec.params() + 416_866_032 + 1152 + 1152 * spec.hidden_size == PUBLISHED_WITH_IMAGES[name]


def test_every_preset_is_checked() -> None:
    named = {*PUBLISHED, *PUBLISHED_WITH_IMAGES}
    assert named == {name for name in preset_names() if not name.startswith(("tiny-", "nano-"))}


@pytest.mark.parametrize("name", BILLIONS_PER_TOKEN)
def test_parameters_one_token_uses(name: str) -> None:
    assert preset(name).params(active=True) / 1e9 == pytest.approx(BILLIONS_PER_TOKEN[name], abs=0.06)


@sampled(4)
@pytest.mark.parametrize("name", [name for name in preset_names() if preset(name).layers <= 36])
def test_transformers_builds_as_many_parameters(name: str) -> None:
    """Deeper ones only repeat layers, and add up to the published totals above."""
    spec = preset(name)
    config = transformers.AutoConfig.for_model(**config_from_spec(spec, dtype="bfloat16"))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    corrections = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert sum(tensor.numel() for tensor in (*model.parameters(), *corrections)) == spec.params()


@pytest.mark.parametrize("name", [name for name in preset_names() if name.startswith("tiny-")])
def test_tiny_presets_are_tiny(name: str) -> None:
    assert preset(name).params() < 300_000


def test_there_is_a_tiny_preset_for_every_family() -> None:
    families = {preset(name).family for name in preset_names()}
    assert {preset(name).family for name in preset_names() if name.startswith("tiny-")} == families


def test_rope_constants_that_matter() -> None:
    assert preset("llama-3.1-8b").rope.factor("factor") == 8.0
    assert preset("llama-3.2-1b").rope.factor("factor") == 32.0
    assert len(preset("phi-3-mini-128k").rope.short_factor) == len(preset("phi-3-mini-128k").rope.long_factor) == 48
    assert preset("phi-4-mini").rope.rotated_share * preset("phi-4-mini").head_dim == 96
    assert preset("gemma-3-27b").local_rope.theta == 10_000.0
    assert [i for i in range(26) if preset("gemma-3-1b").window_of(i) is None] == [5, 11, 17, 23]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("llama-3.1-8", "llama-3.1-8b"),
        ("llama3.1-8b", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("mixtral8x7b", "mixtral-8x7b"),
        ("tiny-lama", "tiny-llama"),
    ],
)
def test_unknown_names_are_answered_with_near_ones(typed: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"did you mean.*{meant}"):
        resolve_spec(typed)


@pytest.mark.parametrize("typed", ["", "zzzzzzzz", "x" * 5000, "a\0b", "../nothing/here"])
def test_names_nothing_is_near_to(typed: str) -> None:
    with pytest.raises(UserError, match="neither a model preset nor"):
        resolve_spec(typed)


def test_files_and_directories(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PRESETS["tiny-gemma3"]))
    assert resolve_spec(str(path)) == resolve_spec(str(tmp_path)) == preset("tiny-gemma3")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b'{"model_type": "lla', "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"[]", "holds a list"),
        (b'{"model_type": "llama", "rms_norm_eps": NaN}', "rms_norm_eps in .*config.json is nan"),
        (b'{"model_type": "llama", "rms_norm_eps": 1e999}', "rms_norm_eps in .*config.json is inf"),
        (b" " * (17 * 2**20), "larger than 16 MiB"),
    ],
    ids=["empty", "truncated", "binary", "deep", "long-number", "list", "nan", "infinite", "large"],
)
def test_bad_files(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        resolve_spec(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither a model preset nor a directory with a config\.json"):
        resolve_spec(str(tmp_path))
