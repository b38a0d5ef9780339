"""The AdamW kernels in bf16 on a real GPU: against the plain path, at real sizes, and within a training step."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.models import ragged_batch, tiny_model
from tightfit.jobs.job import Optimizer
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.kernels.optimizer.adamw import Numbers, adamw
from tightfit.kernels.optimizer.adamw8bit import adamw8bit, zero_moments
from tightfit.kernels.optimizer.adamw_list import adamw_list
from tightfit.kernels.triton_support import Impl
from tightfit.train.assembly import assemble
from tightfit.train.optimizer.adamw import MasterAdamW
from tightfit.train.optimizer.updaters import MOMENTS
from tightfit.train.precision import LossScale
from tightfit.train.step import train_step

GPU = torch.device("cuda")
IMPLS: tuple[Impl, ...] = ("torch", "triton")
SHAPES = [(1, 1), (3, 257), (1024, 4096)]
CASES: list[tuple[Any, dict[str, Any]]] = [
    ("bf16", {"optimizer_states": "bf16"}),
    ("bf16", {"optimizer_states": "8bit"}),
    ("fp16", {"optimizer_states": "8bit"}),
    ("bf16", {"optimizer_states": "factored"}),
    ("pure-bf16", {"optimizer_states": "8bit", "rounding": "stochastic"}),
    ("pure-bf16", {"rounding": "stochastic"}),
    ("bf16", {"update_in_backward": True}),
]


def numbers(step: int, key: int | None) -> Numbers:
    return Numbers(1e-2, 0.9, 0.95, 1e-8, 0.1, step, key)


def follows(plain: Tensor, ours: Tensor) -> None:
    """Float32 arithmetic in another order: a last bit here and there, and with bf16 now and then the next number."""
    narrow = plain.dtype == torch.bfloat16
    step, last_bits = 2**-7 if narrow else 2**-20, 2**-20 * plain.abs().max()
    assert ((plain.double() - ours.double()).abs() <= step * plain.double().abs() + last_bits).all()
    assert not narrow or plain.numel() < 1000 or (plain != ours).float().mean() < 0.01


def synchronize(plain: Iterable[Tensor], ours: Iterable[Tensor]) -> None:
    """Every step starts from the same numbers: what follows from a last bit of the step before is no fault."""
    for theirs, own in zip(plain, ours, strict=True):
        own.copy_(theirs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("key", [None, 2**31 + 9])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_weights(shape: tuple[int, ...], key: int | None, states: torch.dtype) -> None:
    torch.manual_seed(0)
    start = torch.randn(shape, device=GPU).bfloat16()
    plain, ours = ((start.clone(), *(torch.zeros(shape, dtype=states, device=GPU) for _ in "mv")) for _ in IMPLS)
    for step in (1, 2, 3):
        gradient = torch.randn(shape, device=GPU).bfloat16()
        for impl, (w, m, v) in zip(IMPLS, (plain, ours), strict=True):
            adamw(w, None, gradient, m, v, torch.tensor(0.5, device=GPU), numbers(step, key), impl)
        for theirs, own in zip(plain, ours, strict=True):
            follows(theirs, own)
        synchronize(plain, ours)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("masters", [False, True])
def test_eight_bits(shape: tuple[int, ...], masters: bool) -> None:
    torch.manual_seed(0)
    start = torch.randn(shape, device=GPU).to(torch.float32 if masters else torch.bfloat16)
    copy = torch.empty_like(start, dtype=torch.bfloat16) if masters else None
    plain, ours = ((start.clone(), *zero_moments(start)) for _ in IMPLS)
    for step in (1, 2, 3):
        gradient = (torch.randn(shape, device=GPU) * torch.exp(2 * torch.randn(shape, device=GPU))).bfloat16()
        for impl, (w, m, m_scale, v, v_scale) in zip(IMPLS, (plain, ours), strict=True):
            adamw8bit(w, copy, gradient, m, m_scale, v, v_scale, None, numbers(step, None), impl)
        follows(plain[0], ours[0])
        assert copy is None or torch.equal(copy, ours[0].bfloat16())
        for codes, other in zip(plain[1::2], ours[1::2], strict=True):
            assert (codes.int() - other.int()).abs().max() <= 1
            assert (codes != other).float().mean() < 0.01 or codes.numel() < 1000
        for scales, other in zip(plain[2::2], ours[2::2], strict=True):
            follows(scales, other)
        synchronize(plain, ours)


def test_rounding_is_unbiased() -> None:
    w = torch.ones(1024, 1024, dtype=torch.bfloat16, device=GPU)
    m, v = torch.zeros_like(w, dtype=torch.float32), torch.zeros_like(w, dtype=torch.float32)
    for step in range(1, 41):
        plain = Numbers(2.0**-12, 0.9, 0.95, 1e-8, 0.0, step, 1000 + step)
        adamw(w, None, torch.full_like(w, -1.0), m, v, None, plain)
    assert float(w.double().mean()) - 1 == pytest.approx(40 * 2.0**-12, rel=0.01)


@pytest.mark.parametrize(("precision", "levers"), CASES, ids=str)
def test_training_follows_the_cpu(precision: Any, levers: dict[str, Any]) -> None:
    losses = []
    for device in (torch.device("cpu"), GPU):
        model = tiny_model().to(device)
        settings, chosen = Optimizer(lr=3e-3), Levers.model_validate(levers)
        module, optimizer = assemble(model, None, Layout(), chosen, precision, settings, device, lambda decoder: None)
        scale = LossScale.for_precision(precision)
        batches = [ragged_batch(4, seed=step % 2) for step in range(12)]
        steps = [train_step(module, optimizer, [batch], device, 3e-3, scale) for batch in batches]
        losses.append([step.loss for step in steps])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1][-1] < losses[1][0] - 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_list_follows_torchs_fused_adamw(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(1024, 4096), (4096,), (48, 16), (37,)]
    theirs = [torch.nn.Parameter(torch.randn(shape, device=GPU).to(dtype)) for shape in shapes]
    betas = (
        0.8971,
        0.9513,
    )  # by 0.9 many means lie just between two bf16 numbers, and a last bit decides which is next
    optimizer = torch.optim.AdamW(theirs, lr=1e-2, betas=betas, eps=1e-8, weight_decay=0.1, fused=True)
    for aligned in (3, 4):  # the last size is no multiple of 16
        for _ in range(3):
            held = [optimizer.state[p] for p in theirs[:aligned]]
            before = [p.detach().clone() for p in theirs[:aligned]]
            m, v = (
                [s[kind].clone() if s else torch.zeros_like(p) for s, p in zip(held, before, strict=True)]
                for kind in MOMENTS
            )
            count = int(held[0]["step"].item()) + 1 if held[0] else 1
            for parameter in theirs:
                parameter.grad = torch.randn_like(parameter)
            gradients = [torch.as_tensor(p.grad) for p in theirs[:aligned]]
            adamw_list(before, gradients, m, v, None, Numbers(1e-2, *betas, 1e-8, 0.1, count, None))
            optimizer.step()
            for ours, parameter in zip(before, theirs, strict=False):
                follows(parameter.detach(), ours)
            for found, key in ((m, MOMENTS[0]), (v, MOMENTS[1])):
                for ours, parameter in zip(found, theirs, strict=False):
                    follows(optimizer.state[parameter][key], ours)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_an_update_is_launched_without_a_wait_and_skips_what_is_not_finite(dtype: torch.dtype | None) -> None:
    model = tiny_model().to(GPU)
    optimizer = MasterAdamW(model, Optimizer(), dtype)
    assert optimizer.skips_nan
    train_step(model, optimizer, [ragged_batch(4)], GPU, 1e-3, LossScale())
    before = {name: state.clone() for name, state in optimizer.state().items()}
    for factor in (torch.nan, 0.5):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        on_device = torch.tensor(factor, device=GPU)
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step(1e-3, on_device)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if factor != factor:
            optimizer.uncount_step()
            assert all(torch.equal(before[name], state) for name, state in optimizer.state().items())
    assert not any(torch.equal(before[name], state) for name, state in optimizer.state().items())
