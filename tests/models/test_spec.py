"""ModelSpec: what it refuses, and its counts against sums done by hand."""

from dataclasses import replace
from typing import Any

import pytest

from tightfit.errors import UserError
from tightfit.models.huggingface.config import config_from_spec, spec_from_config
from tightfit.models.presets import PRESETS, preset
from tightfit.models.resolve import reshaped
from tightfit.models.spec import Experts, ModelSpec, Rope

SPEC = ModelSpec(
    family="llama",
    vocab_size=100,
    hidden_size=8,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=2,
    mlp_size=16,
    max_positions=32,
)
# q and o are 8×8, k and v 4×8; gate, up and down 16×8; two norms of 8.
LAYER = 2 * 64 + 2 * 32 + 3 * 128 + 2 * 8


def test_parameters_of_a_dense_model() -> None:
    assert SPEC.layer_params(0) == LAYER
    assert SPEC.params() == SPEC.params(active=True) == 100 * 8 + 2 * LAYER + 8 + 100 * 8
    assert replace(SPEC, tied=True).params() == SPEC.params() - 800


def test_parameters_of_biases_and_extra_norms() -> None:
    assert replace(SPEC, qkv_bias=True).layer_params(0) == LAYER + 8 + 4 + 4
    assert replace(SPEC, output_bias=True).layer_params(0) == LAYER + 8
    assert replace(SPEC, mlp_bias=True).layer_params(0) == LAYER + 16 + 16 + 8
    assert replace(SPEC, qk_norm=True).layer_params(0) == LAYER + 2 + 2
    assert replace(SPEC, sandwich_norms=True).layer_params(0) == LAYER + 16
    assert replace(SPEC, gated=False).layer_params(0) == LAYER - 128
    assert replace(SPEC, norm="layer").layer_params(0) == LAYER + 16
    assert replace(SPEC, rope=None).params() == SPEC.params() + 32 * 8


def test_parameters_of_experts() -> None:
    experts = Experts(count=6, per_token=2, mlp_size=5, shared_size=7, dense_layers=(0,))
    spec = replace(SPEC, experts=experts)
    attention = LAYER - 3 * 128
    assert spec.layer_params(0) == LAYER
    assert spec.layer_params(1) == attention + 6 * 3 * 40 + 6 * 8 + 3 * 56 + 8
    assert spec.layer_params(1, active=True) == attention + 2 * 3 * 40 + 6 * 8 + 3 * 56 + 8
    assert [spec.is_routed(i) for i in range(2)] == [False, True]


def test_windows_and_ropes_by_layer() -> None:
    near = Rope(theta=10.0)
    spec = replace(SPEC, window=4, window_layers=(1,), local_rope=near)
    assert [spec.window_of(i) for i in range(2)] == [None, 4]
    assert [spec.rope_of(i) for i in range(2)] == [spec.rope, near]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "model hidden_size is 0"),
        ({"layers": -1}, "model layers is -1"),
        ({"heads": True}, "model heads is True"),
        ({"vocab_size": 10.0}, "model vocab_size is 10.0"),
        ({"kv_heads": 3}, "4 attention heads and 3 key/value heads"),
        ({"head_dim": 3}, "must be even"),
        ({"rope": Rope(rotated_share=0.5)}, "must be even"),
        ({"window_layers": (0,)}, "model window is None"),
        ({"window_layers": (0,), "window": 0}, "model window is 0"),
        ({"experts": Experts(count=2, per_token=3, mlp_size=4)}, "routes to 3 of 2 experts"),
    ],
)
def test_impossible_shapes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(SPEC, **change)


def test_specs_can_be_compared_and_hashed() -> None:
    assert len({preset("phi-4-mini"), preset("phi-4-mini"), preset("gpt2")}) == 2


def test_sizes_are_changed_by_name() -> None:
    spec = preset("tiny-llama")
    made = reshaped(spec, {"layers": 3, "tied": 1}, "tiny-llama")
    assert (made.layers, made.tied) == (3, True)
    assert isinstance(made.tied, bool)
    assert reshaped(made, {"layers": spec.layers, "tied": int(spec.tied)}, "tiny-llama") == spec
    for changes, words in (({"wheels": 4}, "wheels is not a size"), ({"tied": 2}, "tied is 2")):
        with pytest.raises(UserError, match=words):
            reshaped(spec, changes, "tiny-llama")


@pytest.mark.parametrize(
    ("name", "layers", "windowed"),
    [
        ("tiny-gemma2", 2, (0,)),
        ("tiny-gemma2", 7, (0, 2, 4, 6)),
        ("tiny-mistral", 2, (0, 1)),
        ("tiny-mistral", 5, (0, 1, 2, 3, 4)),
        ("gemma-3-1b", 13, tuple(layer for layer in range(13) if layer % 6 != 5)),
        ("gemma-3-1b", 38, tuple(layer for layer in range(38) if layer % 6 != 5)),
    ],
)
def test_windows_go_with_the_layers(name: str, layers: int, windowed: tuple[int, ...]) -> None:
    """As the family places them, and as its config.json can say."""
    made = reshaped(preset(name), {"layers": layers}, name)
    assert made.window_layers == windowed
    assert spec_from_config(config_from_spec(made, dtype="float32"), name) == made


@pytest.mark.parametrize("layers", [1, 2, 8])
@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("tiny-")])
def test_any_number_of_layers_can_be_saved(name: str, layers: int) -> None:
    made = reshaped(preset(name), {"layers": layers}, name)
    assert made.layers == layers
    config_from_spec(made, dtype="float32")


def test_a_shape_may_be_changed_within_reason() -> None:
    assert reshaped(SPEC, {"layers": 10_000}, "x").layers == 10_000
    for changes in ({"layers": 2**31}, {"hidden_size": 2**40}, {"layers": -1}):
        with pytest.raises(UserError, match=r"it lies between 0 and"):
            reshaped(SPEC, changes, "x")
