"""Updates inside backward: torch's AdamW step for step, gradients gone, clipping by the norm of the step before."""

import gc
import weakref
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.train.models import TINY, ragged_batch, tiny_model
from tightfit.errors import UserError
from tightfit.jobs.job import Job, Optimizer
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.models.decoder import Decoder
from tightfit.train.assembly import assemble
from tightfit.train.optimizer import MasterAdamW, global_norm
from tightfit.train.precision import LossScale
from tightfit.train.rehearsal import rehearse
from tightfit.train.step import NotFiniteError, accumulate, train_step

CPU = torch.device("cpu")
FREE = Optimizer(lr=1e-2, clip_norm=0.0)


def assembled(settings: Optimizer, precision: Any = "fp32", **levers: Any) -> tuple[Decoder, MasterAdamW]:
    model = tiny_model()
    chosen = Levers(update_in_backward=True, **levers)
    return model, assemble(model, None, Layout(), chosen, precision, settings, CPU, lambda decoder: None)[1]


@pytest.mark.parametrize("levers", [{}, {"checkpoint_every": 1}, {"loss": "plain"}])
def test_without_clipping_it_is_the_step_after_backward(levers: dict[str, Any]) -> None:
    inside, optimizer = assembled(FREE, **levers)
    after = tiny_model()
    usual = MasterAdamW(after, FREE)
    for step in range(4):
        batch = ragged_batch(4, seed=step)
        ours = train_step(inside, optimizer, [batch], CPU, 1e-2, LossScale())
        assert all(p.grad is None for p in inside.parameters())
        theirs = train_step(after, usual, [batch], CPU, 1e-2, LossScale())
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-5)
    for (name, a), b in zip(inside.named_parameters(), after.named_parameters(), strict=True):
        assert torch.allclose(a, b[1], rtol=1e-4, atol=1e-6), name


def test_no_two_layers_gradients_are_there_at_once() -> None:
    """Looked at whenever a gradient is complete: those of layers done are gone."""
    model, _ = assembled(FREE)
    seen: list[set[str]] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda _: seen.append({n for n, p in model.named_parameters() if p.grad is not None}))
    accumulate(model, [ragged_batch(4)], CPU)
    assert len(seen) == len(list(model.parameters()))
    assert all(len(there) <= 1 for there in seen)


def test_gradients_are_clipped_by_the_norm_of_the_step_before() -> None:
    """With both betas zero an update is lr · sign(g) whatever the scale, so the moments are what is looked at."""
    settings = Optimizer(lr=1e-3, clip_norm=0.1, betas=(0.0, 0.0))
    model, optimizer = assembled(settings)
    norms = []
    for step in range(3):
        truth = tiny_model()
        truth.load_state_dict(model.state_dict())
        accumulate(truth, [ragged_batch(4, seed=step)], CPU)
        gradients = {n: p.grad for n, p in truth.named_parameters() if p.grad is not None}
        result = train_step(model, optimizer, [ragged_batch(4, seed=step)], CPU, 1e-3, LossScale())
        norm = float(global_norm(gradients.values()))
        assert result.gradient_norm == pytest.approx(norm, rel=1e-4)
        for name, gradient in gradients.items():
            by = norms[-1] if norms else len(gradients) ** 0.5 * float(gradient.norm())
            wanted = gradient * min(1.0, 0.1 / (by + 1e-6))
            assert torch.allclose(optimizer.state()[f"exp_avg/{name}"], wanted, rtol=1e-3, atol=1e-7), (step, name)
        if not norms:
            taken = [optimizer.state()[f"exp_avg/{name}"] for name in gradients]
            assert 0.05 < float(global_norm(taken)) <= 0.1
        norms.append(norm)
    assert all(norm > 0.1 for norm in norms), "nothing was clipped"


@pytest.mark.parametrize(("precision", "form"), [("fp32", "8bit"), ("bf16", "auto"), ("pure-bf16", "factored")])
def test_resumed_to_the_same_bits(precision: str, form: str) -> None:
    settings = Optimizer(lr=1e-2, clip_norm=0.1)
    model, optimizer = assembled(settings, precision, optimizer_states=form)
    for step in range(5):
        if step == 3:
            weights = {n: t.clone() for n, t in model.state_dict().items()}
            saved = {n: t.clone() for n, t in optimizer.state().items()}
        train_step(model, optimizer, [ragged_batch(4, seed=step)], CPU, 1e-2, LossScale())
    other, resumed = assembled(settings, precision, optimizer_states=form)
    other.load_state_dict(weights)
    resumed.load_state(saved, "a file")
    assert float(saved["previous_norm/all"]) > 0.1
    for step in (3, 4):
        train_step(other, resumed, [ragged_batch(4, seed=step)], CPU, 1e-2, LossScale())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_loss_that_is_not_finite_is_noticed_before_weights_are() -> None:
    model, optimizer = assembled(FREE)
    before = [p.detach().clone() for p in model.parameters()]
    handle = model.layers[1].mlp.register_forward_hook(lambda _, __, made: (made[0] * float("nan"), made[1]))
    with pytest.raises(NotFiniteError, match="the loss is nan") as caught:
        train_step(model, optimizer, [ragged_batch(4)], CPU, 1e-2, LossScale())
    assert not caught.value.weights_changed
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    handle.remove()
    model.layers[0].mlp.register_full_backward_hook(lambda _, gradients, __: tuple(g * float("inf") for g in gradients))
    with pytest.raises(NotFiniteError, match="gradient norm") as caught:
        train_step(model, optimizer, [ragged_batch(4)], CPU, 1e-2, LossScale())
    assert caught.value.weights_changed


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"global_batch": 16, "levers": {"update_in_backward": True}}, ["one backward", "layout.micro_batch"]),
        ({"global_batch": 16, "layout": {"data": 2}, "levers": {"update_in_backward": True}}, ["2 ranks"]),
        ({"precision": "fp16", "levers": {"update_in_backward": True}}, ["overflow", "bf16"]),
        ({"levers": {"rounding": "stochastic"}, "precision": "bf16"}, ["masters", "pure-bf16"]),
        (
            {"global_batch": 16, "layout": {"data": 2, "zero": 1}, "levers": {"optimizer_states": "factored"}},
            ["layout.zero is 1", "8bit"],
        ),
    ],
)
def test_what_does_not_agree_is_refused_in_a_sentence(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        Job.model_validate({"model": "tiny-llama", "data": "stdlib", "output": "run", "steps": 1, **fields})
    assert all(word in str(caught.value) for word in words)


def test_a_precision_found_out_later_is_refused_as_well() -> None:
    with pytest.raises(UserError, match="precision is fp16"):
        assembled(FREE, "fp16")


def test_the_simulation_shows_gradients_gone() -> None:
    """Backward of a model whose layers are all checkpointed peaks lower by the gradients of nine layers in twelve."""
    from dataclasses import replace

    spec = replace(TINY, layers=12, hidden_size=256, head_dim=64, mlp_size=1024)
    workload = Workload(spec=spec, sequence_length=64, global_batch=1, precision="bf16")
    usual, inside = (
        rehearse(workload, Layout(), Levers(checkpoint_every=1, update_in_backward=inside)) for inside in (False, True)
    )
    gradients = 2 * spec.params()
    saved = usual.allocated_bytes("optimizer") - inside.allocated_bytes("optimizer")
    assert saved >= gradients
    assert usual.allocated_bytes("backward") - inside.allocated_bytes("backward") > 9 / 12 * gradients


def test_an_optimizer_goes_when_nobody_needs_it() -> None:
    """Hooks on parameters do not keep it, and the memory of its states, for ever."""
    model, optimizer = assembled(FREE)
    train_step(model, optimizer, [ragged_batch(4)], CPU, 1e-2, LossScale())
    there = weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert there() is None
