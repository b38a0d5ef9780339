"""The loss without logits is transformers' own loss in every way it can be asked for."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor

from tests.covering import sampled
from tests.hf.models import FAMILIES, VOCABULARY, gradients, make_batch, make_model, make_twins
from tightfit.errors import UserError
from tightfit.hf import accelerate
from tightfit.hf.logits import LogitsOnDemand

SHIFTED = torch.randint(0, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(5))
KEPT = torch.randint(0, VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(6))


def assert_alike(ours: Any, plain: Any, batch: dict[str, Any]) -> None:
    """Loss and every gradient."""
    losses = [model(**batch).loss for model in (plain, ours)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(gradients(ours), gradients(plain), rtol=1e-4, atol=1e-5)


@sampled(3)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt2", "paligemma"])
@pytest.mark.parametrize(
    "asked",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(31)},
        {"shift_labels": SHIFTED},
        {"ignore_index": 3},
        {"logits_to_keep": 4, "shift_labels": KEPT},
        {"logits_to_keep": torch.tensor([1, 3, 5, 6]), "shift_labels": KEPT},
    ],
    ids=["int-count", "tensor-count", "shifted", "ignore-index", "kept-last", "kept-some"],
)
def test_ways_to_ask(family: str, asked: dict[str, Any]) -> None:
    batch = make_batch(family)
    if "ignore_index" in asked:
        batch["labels"] = batch["labels"].clamp(min=3)
    plain, ours = make_twins(family)
    assert_alike(ours, plain, {**batch, **asked})


def test_labels_given_by_position() -> None:
    plain, ours = make_twins("llama")
    batch = make_batch("llama")
    arguments = (batch["input_ids"], batch["attention_mask"], None, None, None, batch["labels"])
    assert ours(*arguments).logits is None
    torch.testing.assert_close(ours(*arguments).loss, plain(*arguments).loss)


@sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_besides_logits_are_the_familys_own(family: str) -> None:
    plain, ours = make_twins(family)
    asked = {**make_batch(family), "use_cache": True, "output_hidden_states": True}
    plain_out, out = plain(**asked), ours(**asked)
    assert type(out) is type(plain_out)
    assert list(out) == [name for name in plain_out if name != "logits"]
    torch.testing.assert_close(out.hidden_states, plain_out.hidden_states, rtol=1e-4, atol=1e-5)
    if getattr(plain_out, "aux_loss", None) is not None:
        torch.testing.assert_close(out.aux_loss, plain_out.aux_loss)


def test_tuples() -> None:
    plain, ours = make_twins("gemma2")
    asked: dict[str, Any] = {**make_batch("gemma2"), "use_cache": False, "return_dict": False}
    expected, made = plain(**asked), ours(**asked)
    assert isinstance(made, tuple)
    assert (len(expected), len(made)) == (2, 1)
    torch.testing.assert_close(made[0], expected[0])


def test_labels_that_do_not_fit_the_kept_positions() -> None:
    _, ours = make_twins("llama")
    with pytest.raises(UserError, match="labels name 26 tokens for 8 positions"):
        ours(**make_batch("llama"), logits_to_keep=4)


def test_no_label_counts() -> None:
    """The mean over nothing is zero, where transformers says NaN; gradients are zero in both."""
    plain, ours = make_twins("llama")
    batch = make_batch("llama")
    batch["labels"] = torch.full_like(batch["labels"], -100)
    assert plain(**batch).loss.isnan()
    for asked in ({}, {"num_items_in_batch": 5}):
        loss = ours(**batch, **asked).loss
        assert loss == 0
        loss.backward()
        assert all((gradient == 0).all() for gradient in gradients(ours).values())


def test_a_loss_of_the_users_own_is_used() -> None:
    plain, ours = make_twins("llama")

    def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)

    for model in (plain, ours):
        model.loss_function = smoothed
    assert ours(**make_batch("llama")).logits is not None
    assert_alike(ours, plain, make_batch("llama"))


def test_frozen_head_and_frozen_layers() -> None:
    plain, ours = make_twins("llama")
    for model in (plain, ours):
        model.lm_head.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
    assert_alike(ours, plain, make_batch("llama"))


@pytest.mark.parametrize("family", ["llama", "gemma2", "paligemma"])
def test_evaluation_makes_logits_when_they_are_read(family: str) -> None:
    plain, ours = (model.eval() for model in make_twins(family))
    batch = make_batch(family)
    calls = []
    ours.lm_head.register_forward_hook(lambda module, args, out: calls.append(tuple(out.shape)))
    with torch.no_grad():
        out, expected = ours(**batch), plain(**batch)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=1e-5)
    assert isinstance(out.logits, LogitsOnDemand)
    assert (out.logits.shape, out.logits.dtype) == (expected.logits.shape, expected.logits.dtype)
    assert len(out.logits) == 2
    assert "LogitsOnDemand" in repr(out.logits)
    assert out.logits.float().dtype == torch.float32
    assert calls == [()]  # the loss alone
    torch.testing.assert_close(out.logits[:, -1].float(), expected.logits[:, -1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.softmax(out.logits, -1), torch.softmax(expected.logits, -1), rtol=1e-5, atol=1e-5)
    assert out.logits.numpy().shape == expected.logits.shape
    assert calls == [(), tuple(expected.logits.shape)]


def test_autocast() -> None:
    plain, ours = make_twins("llama")
    batch = make_batch("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [model(**batch).loss for model in (plain, ours)]
        for loss in losses:
            loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-2, atol=2e-2)
    for name, gradient in gradients(plain).items():
        other = ours.get_parameter(name).grad
        assert other.dtype == gradient.dtype
        assert (other - gradient).norm() <= 0.05 * gradient.norm() + 1e-6, name


def test_a_model_under_accelerates_hooks() -> None:
    """Layers placed by a device map keep their forward aside, where ours has to go."""
    plain = make_model("llama")
    ours = copy.deepcopy(plain)
    for module in ours.modules():
        add_hook_to_module(module, ModelHook())
    assert_alike(accelerate(ours), plain, make_batch("llama"))
    assert ours(**make_batch("llama")).logits is None
