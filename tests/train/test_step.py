"""One optimizer step: accumulation equals the big batch, clipping, loss scaling, and NaN before the weights change."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.covering import sampled
from tests.train.models import TINY_ROUTED, ragged_batch, tiny_model
from tightfit.jobs.job import Optimizer
from tightfit.jobs.levers import Levers
from tightfit.models.decoder import Decoder
from tightfit.train.optimizer.adamw import MasterAdamW, global_norm
from tightfit.train.precision import LossScale
from tightfit.train.step import NotFiniteError, accumulate, train_step

CPU = torch.device("cpu")


def gradients(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    """‖found − truth‖ / ‖truth‖."""
    return ((found - truth).norm() / truth.norm()).item()


def split_rows(batch: dict[str, torch.Tensor], rows: int) -> list[dict[str, torch.Tensor]]:
    pieces = zip(*(value.split(rows) for value in batch.values()), strict=True)
    return [dict(zip(batch, piece, strict=True)) for piece in pieces]


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_accumulation_equals_the_big_batch_with_ragged_masks(micro_batch: int) -> None:
    batch = ragged_batch(8)
    whole, parts = tiny_model(), tiny_model()
    loss, tokens = accumulate(whole, [batch], CPU)
    loss_parts, tokens_parts = accumulate(parts, split_rows(batch, micro_batch), CPU)
    assert tokens == tokens_parts == int((batch["labels"] != -100).sum())
    assert torch.allclose(loss, loss_parts, rtol=1e-6)
    for name, gradient in gradients(whole).items():
        assert distance(gradients(parts)[name], gradient) < 1e-5, name


def test_the_loss_is_a_mean_over_tokens_not_a_mean_of_means() -> None:
    batch = ragged_batch(8)
    model = tiny_model()
    loss, _ = accumulate(model, split_rows(batch, 2), CPU)
    logits = model(batch["tokens"], documents=batch["documents"]).logits
    assert logits is not None
    truth = F.cross_entropy(logits.double().flatten(0, 1), batch["labels"].flatten())
    halves = [
        F.cross_entropy(logits[i : i + 2].double().flatten(0, 1), batch["labels"][i : i + 2].flatten())
        for i in range(0, 8, 2)
    ]
    assert loss.item() == pytest.approx(truth.item(), rel=1e-6)
    assert loss.item() != pytest.approx(torch.stack(halves).mean().item(), rel=1e-3)


def test_a_step_without_counted_tokens_changes_nothing_but_decay() -> None:
    batch = ragged_batch(2)
    batch["labels"].fill_(-100)
    model = tiny_model()
    projection: Any = model.layers[0].attention.q
    before = projection.weight.clone()
    result = train_step(model, MasterAdamW(model, Optimizer(weight_decay=0.0)), [batch], CPU, 1e-3, LossScale())
    assert (result.loss, result.tokens) == (0.0, 0)
    assert torch.equal(before, projection.weight)


def test_clipping_limits_the_global_norm() -> None:
    batch = ragged_batch(4)
    reference, clipped = tiny_model(), tiny_model()
    accumulate(reference, [batch], CPU)
    norm = float(torch.cat([g.flatten() for g in gradients(reference).values()]).double().norm())
    largest = norm / 3
    optimizer = MasterAdamW(clipped, Optimizer(clip_norm=largest, betas=(0.0, 0.0)))
    result = train_step(clipped, optimizer, [batch], CPU, 0.0, LossScale())
    assert result.gradient_norm == pytest.approx(norm, rel=1e-5)
    moments = [state for name, state in optimizer.state().items() if name.startswith("exp_avg/")]
    assert float(global_norm(moments)) == pytest.approx(largest, rel=1e-4)


def test_nan_loss_stops_before_the_weights_change() -> None:
    model: Any = tiny_model()
    optimizer = MasterAdamW(model, Optimizer())
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    projection = model.layers[0].mlp.up
    before = projection.weight.clone()
    with pytest.raises(NotFiniteError, match="loss is nan"):
        train_step(model, optimizer, [ragged_batch(4)], CPU, 1e-3, LossScale())
    assert torch.equal(before, projection.weight)


@sampled(2)
@pytest.mark.parametrize("l1", [0.0, 1e-3])
@pytest.mark.parametrize("form", ["fp32", "8bit"])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_a_step_that_is_not_finite_changes_no_state_and_is_not_counted(l1: float, form: Any, clip_norm: float) -> None:
    """Whether its update is launched before the host knows the loss (torch's AdamW), or after."""
    settings = Optimizer(clip_norm=clip_norm, l1=l1)
    levers = Levers(optimizer_states=form)
    poisoned, sound = tiny_model(), tiny_model()
    optimizer, reference = (MasterAdamW(model, settings, torch.bfloat16, levers) for model in (poisoned, sound))
    assert optimizer.skips_nan is (form == "fp32" and not l1)
    before = {name: state.clone() for name, state in optimizer.state().items()}
    hook = poisoned.embed.weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(NotFiniteError, match="gradient norm"):
        train_step(poisoned, optimizer, [ragged_batch(4)], CPU, 1e-3, LossScale())
    assert all(torch.equal(before[name], state) for name, state in optimizer.state().items())
    hook.remove()
    for model, own in ((poisoned, optimizer), (sound, reference)):
        own.drop_gradients()
        train_step(model, own, [ragged_batch(4)], CPU, 1e-3, LossScale())
    assert all(torch.equal(reference.state()[name], state) for name, state in optimizer.state().items())


def test_infinite_gradients_stop_unless_the_scale_can_shrink() -> None:
    batch = ragged_batch(4)
    model = tiny_model()
    model.embed.weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(NotFiniteError, match="gradient norm"):
        train_step(model, MasterAdamW(model, Optimizer()), [batch], CPU, 1e-3, LossScale())


def test_fp16_overflow_skips_the_step_halves_the_scale_and_recovers() -> None:
    batch = ragged_batch(4)
    model = tiny_model()
    optimizer = MasterAdamW(model, Optimizer(), torch.float16)
    scale = LossScale(value=2.0**30, dynamic=True)
    before = optimizer.state()["master/embed.weight"].clone()
    first = train_step(model, optimizer, [batch], CPU, 1e-3, scale)
    assert (first.skipped, scale.value) == (True, 2.0**29)
    assert torch.equal(before, optimizer.state()["master/embed.weight"])
    results = [train_step(model, optimizer, [batch], CPU, 1e-2, scale) for _ in range(40)]
    assert [result.skipped for result in results[-20:]] == [False] * 20
    assert results[-1].loss < results[0].loss - 0.2


def test_loss_scale_grows_after_a_calm() -> None:
    scale = LossScale(value=8.0, dynamic=True, growth_interval=3)
    for _ in range(3):
        scale.update(overflowed=False)
    assert scale.value == 16.0
    scale.update(overflowed=True)
    assert (scale.value, scale.calm_steps) == (8.0, 0)


def test_routed_layers_add_their_balance_loss_to_the_gradient() -> None:
    batch = ragged_batch(4)
    with_balance, without = tiny_model(TINY_ROUTED), tiny_model(TINY_ROUTED)
    accumulate(with_balance, [batch], CPU)
    output = without(batch["tokens"], batch["labels"], documents=batch["documents"])
    assert output.loss is not None
    assert output.auxiliary is not None
    tokens = int((batch["labels"] != -100).sum())
    (output.loss / tokens + output.auxiliary).backward()
    for name, gradient in gradients(without).items():
        assert distance(gradients(with_balance)[name], gradient) < 1e-5, name


def test_a_step_tells_where_it_is() -> None:
    seen: list[str] = []
    model = tiny_model()
    batches = split_rows(ragged_batch(4), 2)
    train_step(model, MasterAdamW(model, Optimizer()), batches, CPU, 1e-3, LossScale(), on_phase=seen.append)
    assert seen == ["forward", "backward", "forward", "backward", "optimizer"]
