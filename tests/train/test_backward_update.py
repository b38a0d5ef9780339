"""Updates inside backward: torch's AdamW step for step, gradients gone, clipping by an estimate of their norm."""

import gc
import weakref
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.models import TINY, assert_trained_alike, ragged_batch, tiny_model
from tightfit.errors import UserError
from tightfit.jobs.job import Job, Optimizer
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.models.decoder import Decoder
from tightfit.models.resolve import resolve_spec
from tightfit.prove.rehearsal import rehearse
from tightfit.train.assembly import assemble
from tightfit.train.optimizer.adamw import MasterAdamW, global_norm
from tightfit.train.optimizer.updaters import DeviceNumbers, TorchUpdater, adamw_numbers
from tightfit.train.precision import LossScale
from tightfit.train.step import NotFiniteError, accumulate, train_step

CPU = torch.device("cpu")
FREE = Optimizer(lr=1e-2, clip_norm=0.0)


class CountOperations(TorchDispatchMode):
    """Operations that are dispatched inside."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


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
    assert_trained_alike(inside.state_dict(), after.state_dict())


def test_no_two_matrices_gradients_are_there_at_once() -> None:
    """Looked at whenever a gradient is complete: those of layers done are gone."""
    model, _ = assembled(FREE)
    seen: list[set[str]] = []
    matrices = {n: p for n, p in model.named_parameters() if p.ndim > 1}
    for parameter in model.parameters():
        parameter.register_hook(lambda _: seen.append({n for n, p in matrices.items() if p.grad is not None}))
    accumulate(model, [ragged_batch(4)], CPU)
    assert len(seen) == len(list(model.parameters())) > len(matrices)
    assert all(len(there) <= 1 for there in seen)


def test_gradients_are_clipped_by_what_their_norm_seems_to_be() -> None:
    """With both betas zero an update is lr · sign(g) whatever the scale, so the moments are what is looked at.

    The estimate is made here again in float64, from whole gradients of an equal model, in the order they came. Norms'
    weights come last and are clipped by what is known then.
    """
    settings = Optimizer(lr=1e-3, clip_norm=0.1, betas=(0.0, 0.0))
    model, optimizer = assembled(settings)
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    before: dict[str, float] = {}
    for step in range(3):
        truth = tiny_model()
        truth.load_state_dict(model.state_dict())
        accumulate(truth, [ragged_batch(4, seed=step)], CPU)
        gradients = {n: p.grad for n, p in truth.named_parameters() if p.grad is not None}
        squares = {name: float(gradient.double().square().sum()) for name, gradient in gradients.items()}
        order.clear()
        result = train_step(model, optimizer, [ragged_batch(4, seed=step)], CPU, 1e-3, LossScale())
        assert result.gradient_norm == pytest.approx(sum(squares.values()) ** 0.5, rel=1e-4)
        now, then, whole = 0.0, 0.0, sum(before.values())
        late = [name for name in order if gradients[name].ndim == 1]
        late_square = sum(squares[name] for name in late)
        by_of = dict.fromkeys(late, sum(squares.values()) if before else len(order) / len(late) * late_square)
        for name in (name for name in order if name not in by_of):
            now, then = now + squares[name], then + before.get(name, 0.0)
            by_of[name] = whole * (now + whole / 100) / (then + whole / 100) if before else len(order) * squares[name]
        for name, by in by_of.items():
            wanted = gradients[name] * min(1.0, 0.1 / by**0.5)
            assert torch.allclose(optimizer.state()[f"exp_avg/{name}"], wanted, rtol=1e-3, atol=1e-7), (step, name)
        taken = float(global_norm([optimizer.state()[f"exp_avg/{name}"] for name in order]))
        assert taken <= 0.1 or before
        assert 0.05 < taken < 0.15
        before = squares


@pytest.mark.parametrize(("grown", "least"), [(30.0, 0.07), (1 / 30, 0.02)])
def test_a_sudden_change_of_gradients_is_clipped_in_its_own_step(grown: float, least: float) -> None:
    """By the norm of the step before they would be 3 and 0.0033."""
    settings = Optimizer(lr=1e-3, clip_norm=0.1, betas=(0.0, 0.0))
    model, optimizer = assembled(settings)
    for step in range(2):
        train_step(model, optimizer, [ragged_batch(4, seed=step)], CPU, 0.0, LossScale())
    updates = optimizer.in_backward
    assert updates is not None
    updates.norms[1] /= grown
    train_step(model, optimizer, [ragged_batch(4, seed=1)], CPU, 0.0, LossScale())
    taken = [tensor for name, tensor in optimizer.state().items() if name.startswith("exp_avg/")]
    assert least < float(global_norm(taken)) < 0.14


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
    assert float(saved["previous_norms/all"].norm()) > 0.1
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

    def broken(_: object, gradients: Any, __: object) -> Any:
        return tuple(gradient * float("inf") for gradient in gradients)

    model.layers[0].mlp.register_full_backward_hook(broken)
    with pytest.raises(NotFiniteError, match="gradient norm") as caught:
        train_step(model, optimizer, [ragged_batch(4)], CPU, 1e-2, LossScale())
    assert caught.value.weights_changed


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"global_batch": 16, "levers": {"update_in_backward": True}},
            ["2 micro-batches add up", "layout.micro_batch"],
        ),
        ({"global_batch": 16, "layout": {"data": 2}, "levers": {"update_in_backward": True}}, ["layout.zero is 0"]),
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


def test_an_update_is_three_operations() -> None:
    """Its norm, its factor and the update itself: the host launches these for every matrix."""
    settings = Optimizer(lr=1e-2, clip_norm=0.1)
    model, optimizer = assembled(settings, "bf16")
    for step in range(2):
        train_step(model, optimizer, [ragged_batch(4, seed=step)], CPU, 1e-2, LossScale())
    updates = optimizer.in_backward
    assert updates is not None
    updates.begin(1e-2)
    with CountOperations() as counted:
        for number, update in enumerate(updates.early):
            update.weights[0].parameter.grad = update.weights[0].parameter.detach()
            counted.operations = 0
            updates.complete(number)
            assert counted.operations == 3


@pytest.mark.parametrize("form", ["auto", "8bit", "factored"])
def test_norms_and_biases_are_one_update(form: Any) -> None:
    """Of GPT-2's ten in a layer, and of the others: a list of them, which one kernel updates."""
    model = Decoder(resolve_spec("tiny-gpt2"))
    levers = Levers(update_in_backward=True, optimizer_states=form)
    optimizer = assemble(model, None, Layout(), levers, "fp32", FREE, CPU, lambda decoder: None)[1]
    updates = optimizer.in_backward
    assert updates is not None
    (late,) = [bucket for bucket in optimizer.buckets if len(bucket.names) > 1]
    assert {id(weight.parameter) for weight in updates.late[0].weights} == {id(each) for each in late.parameters}
    assert {n for n, p in model.named_parameters() if p.ndim == 1} == set(late.names)
    assert isinstance(late.updater, TorchUpdater)


def test_an_optimizer_goes_when_nobody_needs_it() -> None:
    """Hooks on parameters do not keep it, and the memory of its states, for ever."""
    model, optimizer = assembled(FREE)
    train_step(model, optimizer, [ragged_batch(4)], CPU, 1e-2, LossScale())
    there = weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert there() is None


@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
def test_updates_that_are_told_the_loss_skip_one_that_is_not_finite(clip_norm: float) -> None:
    """As a CUDA graph does, which the host cannot stop between forward and backward."""
    model, optimizer = assembled(Optimizer(lr=1e-2, clip_norm=clip_norm))
    updates = optimizer.in_backward
    assert updates is not None
    train_step(model, optimizer, [ragged_batch(4)], CPU, 1e-2, LossScale())
    weights, norms = [p.detach().clone() for p in model.parameters()], updates.previous_norms.clone()

    def passed(told: float) -> None:
        updates.begin(1e-2)
        updates.skip_unless_finite(torch.tensor(told))
        accumulate(model, [ragged_batch(4, seed=1)], CPU)
        updates.finish()

    def changed() -> list[bool]:
        return [not torch.equal(*pair) for pair in zip(weights, model.parameters(), strict=True)]

    for told in (torch.nan, torch.inf):
        passed(told)
        assert not any(changed())
        assert torch.equal(updates.previous_norms, norms)
    passed(1.0)
    assert all(changed())


def test_numbers_in_device_memory_are_those_of_the_update() -> None:
    settings = Optimizer(lr=1e-2, betas=(0.9, 0.95))
    there = DeviceNumbers(settings, [0.1, 0.0, 0.1], CPU)
    there.fill(3e-3, 7)
    for decay in (0.0, 0.1):
        wanted = adamw_numbers(settings, 3e-3, weight_decay=decay, step=7).scalars[:3]
        assert there.of(decay).tolist() == torch.tensor(wanted).tolist()
