"""Every family computes what transformers computes: loss, each gradient, logits, step by step; and undone, exactly."""

from functools import partial
from itertools import product

import pytest
import torch

from benchmarks.peers.checkpointing import checkpoint_layers
from tests.covering import sampled, thorough
from tests.hf.models import FAMILIES, gradients, make_batch, make_model, make_twins
from tightfit.hf import accelerate, undo

STEPS, MORE_STEPS = 5, 20


@sampled(5)
@pytest.mark.parametrize(
    ("family", "steps"), [*product(FAMILIES, [STEPS]), *(thorough(family, MORE_STEPS) for family in FAMILIES)]
)
def test_steps_are_the_unpatched_models(family: str, steps: int) -> None:
    twins = make_twins(family)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4) for model in twins]
    for step in range(steps):
        batch = make_batch(family, seed=step)
        losses = [model(**batch).loss for model in twins]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
        for loss in losses:
            loss.backward()
        plain, ours = (gradients(model) for model in twins)
        assert set(plain) == set(ours)
        for name in plain:
            torch.testing.assert_close(
                ours[name], plain[name], rtol=1e-4, atol=1e-5, msg=partial("{}: {}".format, name)
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@sampled(2)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "phi4-mini", "gpt2"])
def test_a_step_through_the_triton_kernels(family: str) -> None:
    """Triton's interpreter runs them here; tests/gpu/test_hf.py runs them for real."""
    twins = make_twins(family, impl="triton")
    batch = make_batch(family)
    losses = [model(**batch).loss for model in twins]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*(gradients(model) for model in reversed(twins)), rtol=1e-4, atol=1e-5)


@sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_without_labels_are_as_before(family: str) -> None:
    plain, ours = make_twins(family)
    batch = make_batch(family)
    del batch["labels"]
    for model in (plain, ours):
        model.eval()
    torch.testing.assert_close(ours(**batch).logits, plain(**batch).logits, rtol=1e-5, atol=1e-6)


@sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_undo_leaves_nothing_behind(family: str) -> None:
    model = make_model(family)
    batch = make_batch(family)
    loss, logits = model(**batch).loss, model(**batch).logits
    before = [set(vars(module)) for module in model.modules()]
    undo(accelerate(model))
    assert [set(vars(module)) for module in model.modules()] == before
    assert torch.equal(model(**batch).loss, loss)
    assert torch.equal(model(**batch).logits, logits)


@sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_norm_mlp_and_attention_is_accelerated(family: str) -> None:
    """Guards against a release of transformers that renames what the table names."""
    _, ours = make_twins(family)
    kinds = ("RMSNorm", "LayerNorm", "MLP", "Experts", "Attention", "NewGELUActivation")
    for module in ours.modules():
        kind = type(module).__name__
        latent = kind.startswith("Deepseek") and kind.endswith("Attention")  # whose rotary is of another kind
        sinks = kind.startswith("GptOss") and not kind.endswith(("RMSNorm", "Experts"))  # halved rotary tables
        if (
            kind.endswith(kinds) and not kind.startswith(("Siglip", "GPT2")) and not latent and not sinks
        ):  # no gate and no rotary
            assert {"forward", "_apply_gate"} & set(vars(module)), kind


@sampled(2)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mixtral", "phi3"])
def test_generation_gives_the_same_tokens(family: str) -> None:
    plain, ours = (model.eval() for model in make_twins(family))
    tokens = make_batch(family)["input_ids"]
    for model in (plain, ours):
        model.config.output_router_logits = False  # transformers 5.17 counts padding wrongly while it generates
    texts = [model.generate(tokens, max_new_tokens=8, do_sample=False) for model in (plain, ours)]
    assert torch.equal(*texts)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_moe", "paligemma"])
def test_gradient_checkpointing(family: str) -> None:
    plain, ours = make_twins(family)
    checkpoint_layers(ours)
    batch = make_batch(family)
    for model in (plain, ours):
        model(**batch).loss.backward()
    torch.testing.assert_close(gradients(ours), gradients(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("listened_to", [False, True])
def test_what_an_mlp_keeps_for_backward(listened_to: bool) -> None:
    """Gate and up; where somebody listens to a projection it is called, and then keeps its input too."""
    _, ours = make_twins("llama")
    mlp, heard, kept = ours.model.layers[0].mlp, [], []
    if listened_to:
        mlp.down_proj.register_forward_hook(lambda module, args, out: heard.append(out.shape))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        mlp(torch.randn(2, 5, 32))
    assert len(heard) == listened_to
    wide = [shape for shape in kept if shape[-1] == 48 and shape[:-1] != (32,)]
    assert len(wide) == (4 if listened_to else 2)  # on a CPU act(gate) is kept as well
