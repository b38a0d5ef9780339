"""The decoder against transformers: logits, loss and every gradient, for every family and every rope."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.covering import sampled
from tests.models.huggingface.reference import CASES, LENGTH, as_stored, distance, pair
from tightfit.models.decoder import Decoder, Implementations
from tightfit.models.huggingface.config import spec_from_config
from tightfit.models.huggingface.families import FAMILIES
from tightfit.models.huggingface.weights import to_hf_state

every_case = pytest.mark.parametrize("name", CASES)


def test_every_family_is_in_the_table() -> None:
    assert {config["model_type"] for config in CASES.values()} == set(FAMILIES)


@sampled(2)
@every_case
def test_logits(name: str) -> None:
    both = pair(name)
    with torch.no_grad():
        wanted = both.theirs(both.tokens).logits
        assert distance(both.ours(both.tokens).logits, wanted) < 1e-5


@sampled(3)
@every_case
def test_loss_and_gradients(name: str) -> None:
    both = pair(name)
    both.theirs.zero_grad()
    both.ours.zero_grad()
    logits = both.theirs(both.tokens).logits
    wanted = F.cross_entropy(logits.flatten(0, 1), both.labels.flatten(), reduction="sum")
    wanted.backward()
    loss = both.ours(both.tokens, both.labels).loss
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    gradients = {n: p.grad for n, p in both.ours.named_parameters() if p.grad is not None}
    found = to_hf_state(gradients, both.ours.spec)
    stored = as_stored(both.theirs, grads=True)
    assert found.keys() == stored.keys()
    worst = max(stored, key=lambda n: distance(found[n], stored[n]))
    assert distance(found[worst], stored[worst]) < 1e-4, worst


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-windowed", "gpt2"])
def test_eager_attention_is_the_same_model(name: str) -> None:
    both = pair(name)
    eager = Decoder(both.ours.spec, Implementations(attention="eager", linear_cross_entropy="eager"))
    eager.load_state_dict(both.ours.state_dict())
    with torch.no_grad():
        assert distance(eager(both.tokens).logits, both.ours(both.tokens).logits) < 1e-5
        assert eager(both.tokens, both.labels).loss.item() == pytest.approx(
            both.ours(both.tokens, both.labels).loss.item()
        )


@pytest.mark.parametrize(
    "name", [n for n, c in CASES.items() if c["model_type"] in ("mixtral", "qwen2_moe", "qwen3_moe")]
)
def test_load_balancing_loss_of_one_layer(name: str) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    both = pair(name)
    layer = next(i for i in range(both.ours.spec.layers) if both.ours.spec.is_routed(i))
    router: Any = both.ours.layers[layer].mlp
    x = torch.randn(2, LENGTH, both.ours.spec.hidden_size)
    with torch.no_grad():
        logits = router.router(x.flatten(0, 1))
        wanted = load_balancing_loss_func((logits,), router.experts_spec.count, router.experts_spec.per_token)
        weight = router.experts_spec.balance_weight
        assert weight > 0
        assert router(x)[1].item() == pytest.approx(weight * wanted.item(), rel=1e-6)


def test_load_balancing_loss_of_the_model_is_the_mean_over_routed_layers_and_is_trainable() -> None:
    ours: Any = pair("qwen2_moe").ours
    output = ours(pair("qwen2_moe").tokens)
    grads = torch.autograd.grad(
        output.auxiliary, [layer.mlp.router.weight for layer in (ours.layers[0], ours.layers[2])]
    )
    assert all(grad.abs().sum() > 0 for grad in grads)
    assert pair("llama").ours(pair("llama").tokens).auxiliary is None


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt2"])
def test_bf16_is_as_close_to_the_truth_as_transformers_is(name: str) -> None:
    both = pair(name)
    theirs, ours = deepcopy(both.theirs).bfloat16(), deepcopy(both.ours).bfloat16()
    with torch.no_grad():
        exact = both.ours(both.tokens).logits
        error, allowed = (distance(model(both.tokens).logits.float(), exact) for model in (ours, theirs))
    assert error < 1.5 * allowed


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral", {"sliding_window": 8}),
        ("qwen2-windowed", {"max_window_layers": 0}),
        ("qwen3-windowed", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("gemma2", {"attn_logit_softcapping": 0.7}),
        ("gemma2", {"final_logit_softcapping": 0.9}),
        ("gemma2", {"query_pre_attn_scalar": 21}),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
        ("gemma3-scaled", {"rope_local_base_freq": 60.0}),
        ("gemma3-scaled", {"rope_theta": 1100.0}),
        ("llama3", {"rope_scaling": None}),
        ("llama-dynamic-beyond", {"max_position_embeddings": 12}),
        ("llama-yarn-constants", {"rope_theta": 510.0}),
        ("phi3-longrope-long", {"original_max_position_embeddings": 32}),
        ("phi3-longrope-short", {"original_max_position_embeddings": 16}),
        ("phi3-partial", {"partial_rotary_factor": 0.25}),
        ("qwen2_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"num_experts_per_tok": 2}),
        ("llama", {"rms_norm_eps": 0.01}),
    ],
)
def test_the_comparison_would_notice(name: str, change: dict[str, Any]) -> None:
    both = pair(name)
    other = Decoder(spec_from_config(CASES[name] | change, name))
    other.load_state_dict(both.ours.state_dict())
    with torch.no_grad():
        assert distance(other(both.tokens).logits, both.ours(both.tokens).logits) > 1e-4
