"""The fused distillation loss against float64 autograd of the formulas, in chunks of every size."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import sampled
from tests.kernels.truth import DEVICE, DTYPES, assert_no_worse, error
from tightfit.errors import UserError
from tightfit.kernels.loss import linear_distillation as loss_module
from tightfit.kernels.loss.linear_cross_entropy import linear_cross_entropy
from tightfit.kernels.loss.linear_distillation import (
    DIVERGENCES,
    DistillationTerms,
    linear_distillation,
    linear_distillation_eager,
)
from tightfit.levers.policy.loss_chunks import SPLIT_SUM_BYTES, DistillationChunks

N, H, G, V = 37, 24, 40, 101


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and weights of student and teacher, and labels of which some do not count."""
    generator = torch.Generator().manual_seed(3)
    shapes = (N, H), (V, H), (N, G), (V, G)
    hidden, weight, taught, teacher = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[::5] = -100
    return hidden, weight, taught, teacher, labels


def by_autograd(terms: DistillationTerms, parts: tuple[Tensor, ...], divisor: float) -> tuple[Tensor, ...]:
    """Loss and gradients of the formula, written out once more in float64."""
    h, w, g, t = (x.double() for x in parts[:4])
    labels, tau = parts[4], terms.temperature
    h.requires_grad_(), w.requires_grad_()
    logits, taught = h @ w.T, g @ t.T
    if terms.softcap is not None:
        logits = terms.softcap * torch.tanh(logits / terms.softcap)
    if terms.teacher_softcap is not None:
        taught = terms.teacher_softcap * torch.tanh(taught / terms.teacher_softcap)
    p, q = torch.softmax(logits / tau, -1), torch.softmax(taught / tau, -1)
    m = terms.beta * q + (1 - terms.beta) * p
    divergence = {
        "forward": q * (q / p).log(),
        "reverse": p * (p / q).log(),
        "jsd": terms.beta * q * (q / m).log() + (1 - terms.beta) * p * (p / m).log(),
    }[terms.divergence].sum(-1)
    counted = labels != -100
    entropy = -torch.log_softmax(logits, -1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    loss = ((1 - terms.alpha) * entropy + terms.alpha * tau**2 * divergence)[counted].sum() / divisor
    gradients = torch.autograd.grad(loss, (h, w))
    return loss.detach(), *gradients


def fused(
    terms: DistillationTerms,
    parts: tuple[Tensor, ...],
    divisor: float,
    chunk_bytes: int,
    factor: float = 1.0,
    impl: Any = "torch",
) -> tuple[Tensor, ...]:
    """Loss and gradients; `factor` comes in as the gradient of the loss and is taken out again."""
    hidden, weight = (x.clone().requires_grad_() for x in parts[:2])
    loss = linear_distillation(
        hidden, weight, parts[2], parts[3], parts[4], terms, divisor=divisor, chunk_bytes=chunk_bytes, impl=impl
    )
    (loss * factor).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad / factor, weight.grad / factor


CASES = [
    *(DistillationTerms(divergence=divergence, alpha=0.7, temperature=1.7) for divergence in DIVERGENCES),
    DistillationTerms(divergence="jsd", beta=0.1, alpha=1.0, temperature=0.8),
    DistillationTerms(divergence="reverse", softcap=5.0, teacher_softcap=3.0),
    DistillationTerms(alpha=0.0),
]


@sampled(5)
@pytest.mark.parametrize("terms", CASES, ids=str)
@pytest.mark.parametrize(
    ("impl", "chunk_bytes"), [("torch", 1), ("torch", 20_000), ("torch", 2**30), ("triton", 20_000)]
)
def test_against_float64_autograd(terms: DistillationTerms, impl: str, chunk_bytes: int) -> None:
    parts = tuple(x.to(DEVICE) for x in problem())
    for found, wanted in zip(
        fused(terms, parts, 11.0, chunk_bytes, 3.0, impl), by_autograd(terms, parts, 11.0), strict=True
    ):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_sums_in_24_bits(divergence: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk's products lie where its teacher's logits were, so padding of the next chunk's holds parts of floats.

    Here of float32 hidden states, since the interpreter's bf16 is wrong; the weight is bf16, as its gradient is.
    """
    hidden, weight, *others = (x.to(DEVICE) for x in problem())
    chunks = DistillationChunks(rows=16, taught_rows=5, sum_bytes=SPLIT_SUM_BYTES, taught_bytes=4 * V * H, row_bytes=0)
    monkeypatch.setattr(loss_module, "_chunks", lambda *_, **__: chunks)
    terms = DistillationTerms(divergence=divergence, teacher_softcap=3.0)
    parts = (hidden, weight.bfloat16(), *others)
    truth = by_autograd(terms, parts, 11.0)
    for factor in (1.0, 3.0):
        loss, d_hidden, d_weight = fused(terms, parts, 11.0, 1, factor, "triton")
        assert d_weight.dtype == torch.bfloat16
        assert error(loss, truth[0]) < 1e-5
        assert error(d_hidden, truth[1]) < 2e-5
        twice = 2 if factor > 1 else 1  # the test divides by the factor, in bf16
        assert error(d_weight, truth[2]) <= 1.05 * twice * error(truth[2].bfloat16(), truth[2])


@sampled(3)
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(
    ("impl", "dtype"), [("torch", torch.bfloat16), *(("triton", d) for d in DTYPES), ("torch", torch.float16)]
)
def test_no_worse_than_eager_in_the_same_dtype(divergence: str, impl: str, dtype: torch.dtype) -> None:
    terms = DistillationTerms(divergence=divergence, temperature=2.0)  # type: ignore[arg-type]
    parts = tuple(x.to(DEVICE) for x in problem(dtype))
    truth = by_autograd(terms, parts, 11.0)
    hidden, weight = (x.clone().requires_grad_() for x in parts[:2])
    loss = linear_distillation_eager(hidden, weight, parts[2], parts[3], parts[4], terms).sum() / 11
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    eager = (loss.detach(), hidden.grad, weight.grad)
    assert_no_worse(fused(terms, parts, 11.0, 20_000, impl=impl), eager, truth)


def test_without_a_teacher_it_is_cross_entropy() -> None:
    parts = problem()
    made = linear_distillation(*parts[:4], parts[4], DistillationTerms(alpha=0.0), divisor=5.0)
    torch.testing.assert_close(made, linear_cross_entropy(parts[0], parts[1], parts[4], divisor=5.0))


def test_a_student_that_is_its_teacher_has_nothing_to_learn() -> None:
    hidden, weight, _, _, labels = problem()
    for divergence in DIVERGENCES:
        terms = DistillationTerms(alpha=1.0, divergence=divergence)
        loss, d_hidden, d_weight = fused(terms, (hidden, weight, hidden, weight, labels), 1.0, 20_000)
        for found in (loss, d_hidden, d_weight):
            assert float(found.abs().max()) < 1e-4


def test_far_apart_predictions_stay_finite() -> None:
    """Probabilities that underflow in float32 on both sides."""
    hidden, weight, taught, teacher, labels = problem()
    hidden, taught, labels = hidden[:6], taught[:6], labels[:6]
    for divergence in DIVERGENCES:
        terms = DistillationTerms(divergence=divergence, temperature=1.0)
        for impl in ("torch", "triton"):
            parts = tuple(x.to(DEVICE) for x in (hidden * 40, weight, taught * 40, teacher, labels))
            for found in fused(terms, parts, 1.0, 20_000, impl=impl):
                assert bool(found.isfinite().all())


def test_other_vocabularies_and_terms_are_refused() -> None:
    hidden, weight, taught, teacher, labels = problem()
    with pytest.raises(UserError, match="one vocabulary"):
        linear_distillation(hidden, weight, taught, teacher[:-1], labels, DistillationTerms())
    with pytest.raises(UserError, match="do not fit"):
        linear_distillation(hidden, weight, taught[:-1], teacher, labels, DistillationTerms())
    with pytest.raises(UserError, match="alpha"):
        DistillationTerms(alpha=2.0)
