"""config.json both ways, with transformers' own config classes as the judge, and everything a bad file can hold."""

import json
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import transformers

from tests.covering import sampled
from tests.models.huggingface.reference import CASES, pair
from tightfit.errors import UserError
from tightfit.models.huggingface.config import config_from_spec, spec_from_config
from tightfit.models.huggingface.families import FAMILIES
from tightfit.models.presets import preset, preset_names
from tightfit.models.spec import Experts, Rope

LLAMA = CASES["llama"]


def theirs(config: dict) -> transformers.PreTrainedConfig:
    return transformers.AutoConfig.for_model(**deepcopy(config))


def as_saved(config: dict) -> dict:
    """The config.json that transformers writes for `config`, in its own current style."""
    return json.loads(theirs(config).to_json_string(use_diff=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    config, row = theirs({"model_type": family}), FAMILIES[family]
    for name, value in row.defaults.items():
        if name in ("rope_theta", "rope_local_base_freq"):
            continue
        if name == "sliding_window_pattern":
            types = [
                "full_attention" if (i + 1) % value == 0 else "sliding_attention"
                for i in range(config.num_hidden_layers)
            ]
            assert config.layer_types == types
        elif name != "sliding_window" or "use_sliding_window" not in row.defaults:
            assert getattr(config, name, value) == value, name
    without_default = {"num_experts_per_tok": 6} if family == "deepseek_v2" else {}
    given = {"model_type": family, **without_default}
    assert spec_from_config(given, "empty") == spec_from_config(as_saved(given), "full")


@pytest.mark.parametrize("name", CASES)
def test_what_transformers_saves_reads_the_same(name: str) -> None:
    assert spec_from_config(as_saved(CASES[name]), "saved") == spec_from_config(CASES[name], "original")


@sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_what_we_write_is_the_same_model_to_transformers(name: str) -> None:
    both = pair(name)
    config = json.loads(json.dumps(config_from_spec(both.ours.spec, dtype="float32")))
    model = transformers.AutoModelForCausalLM.from_config(
        theirs(config), attn_implementation="eager", experts_implementation="eager"
    ).eval()
    model.load_state_dict(both.theirs.state_dict())
    with torch.no_grad():
        assert torch.equal(model(both.tokens).logits, both.theirs(both.tokens).logits)
    assert spec_from_config(as_saved(config), "saved") == both.ours.spec


@pytest.mark.parametrize("name", preset_names())
def test_presets_survive_the_round_trip_through_transformers(name: str) -> None:
    config = config_from_spec(preset(name), dtype="bfloat16", extra={"eos_token_id": 2})
    assert spec_from_config(as_saved(config), name) == preset(name)
    read = theirs(config)
    assert read.dtype == torch.bfloat16
    assert read.eos_token_id == 2
    assert read.architectures == [FAMILIES[preset(name).family].architecture]


def test_text_part_of_a_multimodal_gemma3() -> None:
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
    }
    assert spec_from_config(config, "gemma-3-4b-it") == preset("gemma-3-4b")
    assert spec_from_config(as_saved(config), "gemma-3-4b-it") == preset("gemma-3-4b")


def test_gemma_s_gelu_is_the_tanh_one() -> None:
    config = CASES["gemma"] | {"hidden_act": "gelu", "hidden_activation": None}
    assert spec_from_config(config, "gemma-7b").activation == "gelu_tanh"


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_phi3_s_older_names_of_longrope(kind: str) -> None:
    config = deepcopy(CASES["phi3-longrope-long"])
    config["rope_scaling"]["type"] = kind
    del config["rope_scaling"]["rope_type"]
    assert spec_from_config(config, "phi3") == spec_from_config(CASES["phi3-longrope-long"], "phi3")


SPEC = spec_from_config(LLAMA, "x")
INEXPRESSIBLE = {
    "qk_norm": replace(SPEC, qk_norm=True),
    "experts": replace(SPEC, experts=Experts(count=4, per_token=1, mlp_size=8)),
    "local_rope": replace(SPEC, local_rope=Rope(theta=5.0)),
    "window": replace(SPEC, window=4, window_layers=(1,)),
    "rope": replace(SPEC, rope=Rope(rotated_share=0.5)),
    "qkv_bias": replace(SPEC, qkv_bias=True, output_bias=False),
    "attention_scale": replace(SPEC, attention_scale=0.3),
    "embedding_scale": replace(SPEC, embedding_scale=2.0),
}


@pytest.mark.parametrize("field", INEXPRESSIBLE)
def test_specs_a_family_cannot_say_are_not_written(field: str) -> None:
    with pytest.raises(UserError, match=f"a llama config.json cannot say {field} = "):
        config_from_spec(INEXPRESSIBLE[field], dtype="float32")


def test_bad_arguments_of_writing() -> None:
    with pytest.raises(UserError, match="dtype is 'int8'; use one of float32"):
        config_from_spec(SPEC, dtype="int8")
    with pytest.raises(UserError, match="hidden_size"):
        config_from_spec(SPEC, dtype="float32", extra={"hidden_size": 64})
    with pytest.raises(UserError, match="supported families"):
        config_from_spec(replace(SPEC, family="falcon"), dtype="float32")


def test_configs_presets_and_resolution_need_no_torch() -> None:
    code = (
        "import sys, tightfit.models.resolve as r; r.resolve_spec('llama-3.1-8b');"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy', 'safetensors')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
