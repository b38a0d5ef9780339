"""SmoothQuant: the strength it picks is the best of all that are tried, and moving scales changes no output."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compress.conftest import SPEC, random_model
from tests.covering import sampled
from tightfit.compress.calibration.observation import observe
from tightfit.compress.linear_sets import linear_sets
from tightfit.compress.recipe import Step
from tightfit.compress.rounding.smoothquant import BEHIND_NORMS, STRENGTHS, smooth
from tightfit.models.decoder import Decoder, Layer
from tightfit.models.spec import ModelSpec

TOKENS = torch.arange(96).view(2, 48) * 7 % 250
SETS = {"attention": ("q", "k", "v"), "mlp": ("gate", "up")}


def outliers(model: Decoder, seed: int, size: float) -> Decoder:
    """A few channels of what goes into the layers' projections are `size` times as large; few weights are, too."""
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model.layers:
            parts: Any = layer
            for norm in (parts.attention_norm, parts.mlp_norm):
                norm.weight[torch.randperm(64, generator=made)[:3]] *= size
            for module in (parts.attention.q, parts.mlp.up):
                module.weight[:, torch.randperm(64, generator=made)[:4]] *= 3
    return model


def layer_inputs(model: Decoder) -> Tensor:
    with torch.no_grad():
        return model.embed_tokens(TOKENS, model.token_positions(TOKENS, None, None))


def error_by_hand(x: Tensor, largest: Tensor, weights: Tensor, alpha: float, *, static: bool) -> float:
    """‖round(x / s) round(W s)ᵀ − x Wᵀ‖² in float64: every input and weight to the nearest multiple of its scale."""
    s = largest**alpha / weights.abs().amax(0) ** (1 - alpha)
    a, w = x / s, weights * s
    span = (largest / s).max() / 127.5 if static else a.abs().amax(-1, keepdim=True) / 127
    step = w.abs().amax(-1, keepdim=True) / 127.5
    rounded_a = (a / span).round().clamp(-128, 127) * span
    rounded_w = (w / step).round().clamp(-128, 127) * step
    return float((rounded_a @ rounded_w.T - x @ weights.T).square().sum())


@pytest.mark.parametrize("static", [False, True], ids=["per token", "static"])
@pytest.mark.parametrize(("seed", "size"), [(0, 1.0), (1, 8.0), (2, 40.0), (3, 300.0)])
def test_the_strength_is_the_best_of_all(seed: int, size: float, static: bool) -> None:
    """By float64 arithmetic of our own over all strengths; of two within a hundredth float32 may take either."""
    model = outliers(random_model(SPEC), seed, size)
    layer: Any = model.layers[0]
    step = Step(method="smoothquant", static="minmax" if static else None)
    scheme = step.scheme()
    assert scheme is not None
    for group in linear_sets(SPEC, 0):
        if group.before not in BEHIND_NORMS:
            continue
        seen = observe(model, layer, [layer_inputs(model)], [group.names[0]])[group.names[0]]
        weights = torch.cat([layer.get_submodule(name).weight for name in group.names]).detach().double()
        x, largest = seen.sample.double(), seen.largest.double()
        errors = {alpha: error_by_hand(x, largest, weights, alpha, static=static) for alpha in STRENGTHS}
        chosen = smooth(layer, group, seen, scheme, step)
        assert chosen is not None
        assert errors[chosen] <= 1.01 * min(errors.values()), (group.names, chosen, errors)
        assert max(errors.values()) > 1.2 * min(errors.values()), "all strengths are alike here"


FAMILIES: dict[str, ModelSpec] = {
    "llama": SPEC,
    "gemma": replace(SPEC, family="gemma", norm="rms_plus_one", embedding_scale=8.0, activation="gelu_tanh"),
    "gpt2": replace(
        SPEC,
        family="gpt2",
        norm="layer",
        gated=False,
        rope=None,
        kv_heads=4,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        activation="gelu_tanh",
    ),
}


@sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("alpha", [0.25, 0.6, 0.9, None])
def test_what_is_folded_into_norms_changes_no_logits(family: str, alpha: float | None) -> None:
    """Weights and norms are others, and the model computes the same but for float32's rounding."""
    spec = FAMILIES[family]
    model = outliers(random_model(spec), 1, 10.0) if family == "llama" else random_model(spec)
    with torch.no_grad():
        wanted = model(TOKENS).logits
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        x = layer_inputs(model)
        step = Step(method="smoothquant", alpha=alpha)
        scheme = step.scheme()
        assert scheme is not None
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, Layer)
            for group in linear_sets(spec, index):
                seen = observe(model, layer, [x], [group.names[0]])[group.names[0]]
                smooth(layer, group, seen, scheme, step)
        made = model(TOKENS).logits
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    for index in range(spec.layers):
        norms = {f"layers.{index}.attention_norm.weight", f"layers.{index}.mlp_norm.weight"}
        assert norms < changed
        assert {f"layers.{index}.attention.{name}.weight" for name in SETS["attention"]} < changed
    assert not any(name.startswith(("embed", "norm.", "head")) or ".down." in name for name in changed)
    assert float((made - wanted).norm()) <= 2e-5 * float(wanted.norm())
