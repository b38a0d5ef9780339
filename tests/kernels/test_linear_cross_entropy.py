"""Chunked projection and cross entropy against all logits at once, and against finite differences."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.linear_cross_entropy import (
    IGNORE,
    LinearCrossEntropyImpl,
    linear_cross_entropy,
    linear_cross_entropy_eager,
)

ROWS, HIDDEN, VOCAB = 23, 9, 37
# Float32 logits of one row take 4 · VOCAB bytes: chunks of 1, 7 (does not divide), ROWS − 1, ROWS and more rows.
CHUNK_ROWS = (1, 7, ROWS - 1, ROWS, 10 * ROWS)


def inputs(dtype: torch.dtype = torch.float64, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    hidden = torch.randn(rows, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCAB, (rows,))
    labels[::5] = IGNORE
    return hidden, weight, labels


def loss_and_grads(
    impl: LinearCrossEntropyImpl,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    softcap: float | None,
    rows: int = ROWS,
) -> tuple[Tensor, Tensor, Tensor]:
    loss = linear_cross_entropy(hidden, weight, labels, softcap=softcap, chunk_bytes=4 * VOCAB * rows, impl=impl)
    return (loss, *torch.autograd.grad(3.0 * loss, (hidden, weight)))


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("rows", CHUNK_ROWS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_chunked_equals_eager(rows, softcap, dtype, tolerance):
    found = loss_and_grads("chunked", *inputs(dtype), softcap, rows)
    wanted = loss_and_grads("eager", *inputs(dtype), softcap)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype == dtype
        assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_eager_is_what_the_formula_says(softcap):
    hidden, weight, labels = inputs()
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    wanted = -sum(logits[i].log_softmax(-1)[label] for i, label in enumerate(labels) if label != IGNORE)
    assert linear_cross_entropy_eager(hidden, weight, labels, softcap=softcap).item() == pytest.approx(wanted.item())


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradients_by_finite_differences(softcap):
    hidden, weight, labels = inputs(rows=4)

    def chunked(h: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, labels, softcap=softcap, chunk_bytes=4 * VOCAB * 3)

    assert torch.autograd.gradcheck(chunked, (hidden, weight))


def test_low_precision_is_no_worse_than_eager_in_the_same_precision():
    exact = loss_and_grads("eager", *inputs(torch.float64), None)
    low = [x.to(torch.bfloat16).detach().requires_grad_() if x.is_floating_point() else x for x in inputs()]
    eager, chunked = (loss_and_grads(impl, *low, None, 7) for impl in ("eager", "chunked"))
    for truth, reference, found in zip(exact, eager, chunked, strict=True):
        error, allowed = ((x.double() - truth).norm() / truth.norm() for x in (found, reference))
        assert error <= 1.2 * allowed + 1e-3
    assert chunked[0].dtype == torch.float32
    assert chunked[1].dtype == chunked[2].dtype == torch.bfloat16


@pytest.mark.parametrize("impl", ["chunked", "eager"])
def test_all_labels_ignored(impl):
    hidden, weight, labels = inputs()
    loss, d_hidden, d_weight = loss_and_grads(impl, hidden, weight, torch.full_like(labels, IGNORE), None, 7)
    assert loss == 0
    assert d_hidden.abs().sum() == d_weight.abs().sum() == 0


def test_ignored_rows_get_no_gradient():
    hidden, weight, labels = inputs()
    _, d_hidden, _ = loss_and_grads("chunked", hidden, weight, labels, 1.5, 7)
    assert d_hidden[labels == IGNORE].abs().max() == 0
    assert d_hidden[labels != IGNORE].abs().min(dim=1).values.min() > 0


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs(frozen):
    hidden, weight, labels = inputs()
    wanted = dict(zip(("hidden", "weight"), loss_and_grads("eager", hidden, weight, labels, None)[1:], strict=True))
    given = {"hidden": hidden.detach(), "weight": weight.detach()}
    trained = "weight" if frozen == "hidden" else "hidden"
    given[trained].requires_grad_()
    linear_cross_entropy(given["hidden"], given["weight"], labels, chunk_bytes=4 * VOCAB * 7).backward()
    assert given[frozen].grad is None
    assert torch.allclose(3.0 * given[trained].grad, wanted[trained])


@pytest.mark.parametrize("grad", ["both frozen", "no_grad"])
def test_no_gradient_is_computed_where_none_is_wanted(grad, monkeypatch):
    hidden, weight, labels = inputs()
    wanted = linear_cross_entropy_eager(hidden, weight, labels).item()
    monkeypatch.setattr("tightfit.kernels.linear_cross_entropy._losses_and_gradient", None)
    if grad == "no_grad":
        with torch.no_grad():
            loss = linear_cross_entropy(hidden, weight, labels)
    else:
        loss = linear_cross_entropy(hidden.detach(), weight.detach(), labels)
    assert loss.item() == pytest.approx(wanted)
    assert not loss.requires_grad


def test_batched_shapes_and_labels_at_the_ends_of_the_vocabulary():
    hidden, weight = torch.randn(2, 3, HIDDEN), torch.randn(VOCAB, HIDDEN)
    labels = torch.tensor([[0, VOCAB - 1, IGNORE], [VOCAB - 1, 0, 5]])
    wanted = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    assert linear_cross_entropy(hidden, weight, labels).item() == pytest.approx(wanted.item(), rel=1e-5)


def test_large_logits_stay_finite():
    hidden, weight, labels = inputs(torch.float32)
    loss, *grads = loss_and_grads(
        "chunked", *(x.detach().mul(1e3).requires_grad_() for x in (hidden, weight)), labels, None
    )
    assert all(x.isfinite().all() for x in (loss, *grads))


def test_no_rows_at_all():
    loss = linear_cross_entropy(torch.randn(0, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.zeros(0, dtype=torch.long))
    assert loss == 0
