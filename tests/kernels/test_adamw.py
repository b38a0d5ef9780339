"""Our AdamW kernels against float64, torch's AdamW and each other's plain path; odd shapes, mixed formats."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import sampled
from tests.kernels.truth import DEVICE, HAS_GPU, error
from tightfit.jobs.state_format import BLOCK_8BIT
from tightfit.kernels.optimizer.adamw import Numbers, adamw, updated_weight
from tightfit.kernels.optimizer.adamw8bit import WIDTH, adamw8bit, dequantized, quantize_into, zero_moments
from tightfit.kernels.optimizer.stochastic_rounding import key_of

IMPLS = ["torch", "triton"]
NARROW = torch.bfloat16 if HAS_GPU else torch.float16  # the interpreter gets bfloat16 wrong
SHAPES = [(1,), (37,), (5, 300), (3, 256), (2, 7, 65)]
MATRICES = SHAPES[2:]


def numbers(step: int = 1, key: int | None = None) -> Numbers:
    return Numbers(1e-2, 0.9, 0.95, 1e-8, 0.1, step, key)


def gradient(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers over several orders of magnitude, as gradients are."""
    return (0.1 * torch.randn(shape) * torch.exp(2 * torch.randn(shape))).to(DEVICE, dtype)


def test_plain_update_is_torchs_adamw() -> None:
    start = torch.randn(5, 7)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    ours, m, v = start.to(DEVICE), *(torch.zeros(5, 7, device=DEVICE) for _ in range(2))
    for step in range(1, 6):
        given = gradient((5, 7))
        theirs.grad = given.cpu() * 0.5
        optimizer.step()
        adamw(ours, None, given, m, v, torch.tensor(0.5, device=DEVICE), numbers(step))
    assert torch.allclose(ours.cpu(), theirs.detach(), rtol=1e-5, atol=1e-6)


@sampled(3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("states", [torch.float32, NARROW], ids=str)
@pytest.mark.parametrize("with_copy", [False, True])
def test_kernel_is_no_worse_than_eager(shape: tuple[int, ...], states: torch.dtype, with_copy: bool) -> None:
    start, found = torch.randn(shape, device=DEVICE), {}
    gradients = [gradient(shape, NARROW) for _ in range(3)]
    for name, kind in (("truth", torch.float64), ("torch", states), ("triton", states)):
        w, m, v = start.double() if name == "truth" else start.clone(), *(start.new_zeros(shape, dtype=kind),) * 2
        v, copy = v.clone(), torch.empty(shape, dtype=NARROW, device=DEVICE) if with_copy else None
        for step, given in enumerate(gradients, 1):
            if name == "truth":
                w = _exact(w, given.double(), m, v, numbers(step))
            else:
                adamw(w, copy, given, m, v, None, numbers(step), name)  # type: ignore[arg-type]
        found[name] = (w, m, v)
        assert copy is None or name == "truth" or torch.equal(copy, w.to(NARROW))
    for ours, eager, truth in zip(found["triton"], found["torch"], found["truth"], strict=True):
        assert ours.dtype == eager.dtype
        assert error(ours, truth) <= 1.1 * error(eager, truth) + 1e-6


def _exact(w: Tensor, g: Tensor, m: Tensor, v: Tensor, n: Numbers) -> Tensor:
    m.mul_(n.beta1).add_((1 - n.beta1) * g)
    v.mul_(n.beta2).add_((1 - n.beta2) * g * g)
    m_hat, v_hat = m / (1 - n.beta1**n.step), v / (1 - n.beta2**n.step)
    return w * (1 - n.lr * n.weight_decay) - n.lr * m_hat / (v_hat.sqrt() + n.eps)


@sampled(2)
@pytest.mark.parametrize("shape", MATRICES, ids=str)
@pytest.mark.parametrize("key", [None, 77])
def test_eight_bit_kernel_follows_the_plain_path(shape: tuple[int, ...], key: int | None) -> None:
    start, factor = torch.randn(shape, device=DEVICE), torch.tensor(0.25, device=DEVICE)
    sides = {impl: (start.clone(), zero_moments(start)) for impl in IMPLS}
    for step in range(1, 4):
        given = gradient(shape, NARROW)
        for impl, (w, states) in sides.items():
            adamw8bit(w, None, given, *states, factor, numbers(step, key), impl)  # type: ignore[arg-type]
    (w, states), (kernel_w, kernel_states) = sides["torch"], sides["triton"]
    moved = (w - start).abs().max()
    largest = 2**-7 * w.abs() if key is not None else torch.zeros_like(w)  # a last bit may decide which way to round
    assert ((w - kernel_w).abs() <= 1e-3 * moved + largest).all()
    assert (w != kernel_w).float().mean() < 0.01 or key is None
    for codes, other, scale, other_scale in zip(
        states[::2], kernel_states[::2], states[1::2], kernel_states[1::2], strict=True
    ):
        assert (codes.int() - other.int()).abs().max() <= 1
        assert (codes != other).float().mean() < 0.01
        assert torch.allclose(scale, other_scale, rtol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_first_eight_bit_step_is_exact(impl: str) -> None:
    """No moment has been rounded before it is used."""
    start, given = torch.randn(4, 300, device=DEVICE), gradient((4, 300))
    w = start.clone()
    adamw8bit(w, None, given, *zero_moments(w), None, numbers(), impl)  # type: ignore[arg-type]
    wanted = updated_weight(start, given, torch.zeros_like(start), torch.zeros_like(start), None, numbers())
    assert torch.allclose(w, wanted, rtol=1e-5, atol=1e-7)


def test_rounded_moments_are_near_and_second_ones_never_zero() -> None:
    m, v = gradient((6, 700)), gradient((6, 700)).square()
    codes = zero_moments(m)
    quantize_into(m, *codes[:2])
    quantize_into(v, *codes[2:])
    found_m, found_v = dequantized(*codes[:2]), dequantized(*codes[2:])
    large = v > 0.1 * codes[3].repeat_interleave(WIDTH, -1)[:, :700]
    assert (found_v > 0).all()
    assert ((found_v - v).abs() <= 0.036 * v)[large].all()
    assert error(found_m, m) < 0.01
    assert torch.equal(found_m.sign()[codes[0] != 0], m.sign()[codes[0] != 0])


@pytest.mark.parametrize("impl", IMPLS)
def test_zero_gradients_leave_weights_alone(impl: str) -> None:
    w = torch.randn(3, 40, device=DEVICE)
    before, states = w.clone(), zero_moments(w)
    adamw8bit(w, None, torch.zeros_like(w), *states, None, numbers()._replace(weight_decay=0.0), impl)  # type: ignore[arg-type]
    assert torch.equal(w, before)
    assert not states[1].any()
    assert not states[3].any()


def test_blocks_do_not_cross_rows() -> None:
    """Rows updated apart, as ranks do that hold some of them, are those of the whole, rounding included."""
    start, given, key = torch.randn(8, 300, device=DEVICE), gradient((8, 300)), key_of(0, "w", 1)
    whole, states = start.clone(), zero_moments(start)
    adamw8bit(whole, None, given, *states, None, numbers(key=key))
    for first, last in ((0, 3), (3, 8)):
        part = start[first:last].clone()
        own = zero_moments(part)
        adamw8bit(part, None, given[first:last], *own, None, numbers(key=key)._replace(first=first * 300))
        assert torch.equal(part, whole[first:last])
        assert all(torch.equal(a, b[first:last]) for a, b in zip(own, states, strict=True))


def test_the_planner_knows_the_width_of_a_block() -> None:
    assert BLOCK_8BIT == WIDTH


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "8bit"])
def test_numbers_may_be_in_device_memory_and_a_factor_of_nan_changes_nothing(impl: Any, narrow: bool) -> None:
    start, given = torch.randn(3, 256, device=DEVICE), gradient((3, 256))

    def updated(factor: float, asked: Numbers) -> list[Tensor]:
        weight = start.clone()
        if narrow:
            states = zero_moments(weight, lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=DEVICE))
            adamw8bit(weight, None, given, *states, torch.tensor(factor, device=DEVICE), asked, impl)
            return [weight, *states]
        m, v = torch.zeros_like(weight), torch.zeros_like(weight)
        adamw(weight, None, given, m, v, torch.tensor(factor, device=DEVICE), asked, impl)
        return [weight, m, v]

    there = torch.tensor(numbers(7).scalars[:3], device=DEVICE)
    wanted, found = updated(0.5, numbers(7)), updated(0.5, numbers(1)._replace(on_device=there))
    assert all(torch.equal(*pair) for pair in zip(wanted, found, strict=True))
    assert not torch.equal(wanted[0], start)
    weight, *states = updated(torch.nan, numbers(7))
    assert torch.equal(weight, start)
    assert all(not bool(state.any()) for state in states)
