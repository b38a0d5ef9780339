"""Cross entropy of existing logits: the kernel against float64 and plain torch, every option, gradients in place."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.covering import covering, sampled
from tests.kernels.truth import DEVICE, DTYPES, assert_no_worse
from tightfit.errors import UserError
from tightfit.kernels.loss.cross_entropy import cross_entropy

OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "capped": {"softcap": 3.0, "scale": 0.5},
    "z": {"z_loss": 0.01},
    "all": {"label_smoothing": 0.2, "softcap": 4.0, "scale": 2.0, "z_loss": 0.02, "ignore_index": 3},
}


def inputs(rows: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits = (3 * torch.randn(rows, vocab, dtype=torch.float64)).to(DEVICE, dtype)
    labels = torch.randint(0, vocab, (rows,), device=DEVICE)
    labels[::4] = -100
    return logits, labels


def run(logits: Tensor, labels: Tensor, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor]:
    leaf = logits.to(dtype).requires_grad_()
    loss = cross_entropy(leaf * 1, labels, **options)
    given = torch.linspace(0.5, 2.0, loss.numel(), device=DEVICE, dtype=loss.dtype).view(loss.shape)
    return loss, torch.autograd.grad(loss, leaf, given)[0]


REDUCED = [
    *((name, "sum") for name in OPTIONS),
    *((name, other) for name in ("plain", "all") for other in ("mean", "none")),
]
SHAPES = [(5, 3), (5, 64), (3, 1003)]


@sampled(3)
@pytest.mark.parametrize(
    ("dtype", "shape", "way"), covering(list(product(DTYPES, SHAPES, REDUCED)), pairs=True), ids=str
)
def test_no_worse_than_eager(dtype: torch.dtype, shape: tuple[int, int], way: tuple[str, Any]) -> None:
    (rows, vocab), (name, reduction) = shape, way
    logits, labels = inputs(rows, vocab, dtype)
    options = {**OPTIONS[name], "reduction": reduction}
    if options.get("ignore_index") == 3:
        labels[labels == -100] = 3 if vocab > 3 else 0
    truth = run(logits, labels, torch.float64, impl="torch", **options)
    eager = run(logits, labels, dtype, impl="torch", **options)
    for overwrite in (False, True):
        assert_no_worse(run(logits, labels, dtype, impl="triton", overwrite=overwrite, **options), eager, truth)


def test_the_plain_path_is_torchs() -> None:
    logits, labels = inputs(9, 11, torch.float64)
    for reduction in ("sum", "mean", "none"):
        wanted = F.cross_entropy(logits, labels, reduction=reduction, label_smoothing=0.1)
        found = cross_entropy(logits, labels, reduction=reduction, label_smoothing=0.1, impl="torch")
        assert torch.allclose(found, wanted)
    capped = 2.0 * torch.tanh(0.5 * logits / 2.0)
    z = capped.logsumexp(-1)[labels >= 0]
    wanted = F.cross_entropy(capped, labels, reduction="sum") + 0.3 * z.square().sum()
    assert torch.allclose(cross_entropy(logits, labels, softcap=2.0, scale=0.5, z_loss=0.3, impl="torch"), wanted)


@pytest.mark.parametrize("divisor", [7.0, "tensor"])
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_divisor_and_batched_shapes(impl: Any, divisor: Any) -> None:
    logits, labels = inputs(6, 20, torch.float32)
    divisor = torch.tensor(7.0, device=DEVICE) if divisor == "tensor" else divisor
    found = cross_entropy(logits.view(2, 3, 20), labels.view(2, 3), divisor=divisor, impl=impl)
    assert torch.allclose(found, F.cross_entropy(logits, labels, reduction="sum") / 7)
    each = cross_entropy(logits.view(2, 3, 20), labels.view(2, 3), reduction="none", impl=impl)
    assert each.shape == (2, 3)


def test_the_gradient_takes_the_place_of_the_logits_once() -> None:
    logits, labels = inputs(6, 40, torch.float32)
    leaf = logits.requires_grad_()
    made = leaf * 1
    loss = cross_entropy(made, labels, impl="triton")
    (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    assert torch.equal(made, gradient)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaf)


def test_leaves_are_never_overwritten() -> None:
    logits, labels = inputs(6, 40, torch.float32)
    before = logits.clone()
    cross_entropy(logits.requires_grad_(), labels, impl="triton").backward()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("name", ["padded", "shifted", "column major"])
def test_views_keep_what_lies_around_them(name: str) -> None:
    whole = torch.randn(3, 5, 24, device=DEVICE)
    labels = torch.randint(0, 20, (3, 5), device=DEVICE)
    views = {
        "padded": lambda x: (x[..., :20], labels),
        "shifted": lambda x: (x[:, :-1], labels[:, 1:]),
        "column major": lambda x: (x.transpose(0, 1), labels.T),
    }
    leaf = whole.requires_grad_()
    made = leaf * 1
    before = made.detach().clone()
    loss = cross_entropy(*views[name](made), impl="triton")
    (found,) = torch.autograd.grad(loss, leaf)
    (wanted,) = torch.autograd.grad(cross_entropy(*views[name](leaf), impl="torch"), leaf)
    assert torch.allclose(found, wanted, atol=1e-6)
    assert torch.equal(
        made[..., 20:] if name == "padded" else made[:, -1], before[..., 20:] if name == "padded" else before[:, -1]
    )


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_nothing_counts(impl: Any) -> None:
    logits, labels = inputs(4, 9, torch.float32)
    leaf = logits.requires_grad_()
    for reduction in ("sum", "mean"):
        loss = cross_entropy(leaf * 1, torch.full_like(labels, -100), reduction=reduction, impl=impl)
        assert loss == 0
        assert torch.autograd.grad(loss, leaf)[0].abs().max() == 0


def test_labels_outside_the_vocabulary_are_not_silent() -> None:
    logits, labels = inputs(3, 9, torch.float32)
    for wrong in (9, -1):
        labels[1] = wrong
        assert cross_entropy(logits, labels, impl="triton").isnan()


def test_registered_properly_and_inside_compile() -> None:
    logits, labels = inputs(4, 17, torch.float32)
    logits.requires_grad_()
    targets = labels.masked_fill(labels == -100, -2)
    torch.library.opcheck(torch.ops.tightfit.cross_entropy.default, (logits, targets, 0.1, 0.0, 1.0, 0.0, False))

    def block(logits: Tensor) -> Tensor:
        return cross_entropy(logits * 1, labels, reduction="mean", impl="triton")

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    found, wanted = (torch.autograd.grad(way(logits), logits)[0] for way in (compiled, block))
    assert torch.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"reduction": "max"}, "'max'; give sum, mean or none"),
        ({"reduction": "mean", "divisor": 3.0}, "divisor divides the sum"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
        ({"softcap": -1.0}, "softcap is -1.0"),
    ],
)
def test_refused(options: dict[str, Any], sentence: str) -> None:
    logits, labels = inputs(3, 4, torch.float32)
    with pytest.raises(UserError, match=sentence):
        cross_entropy(logits, labels, **options)
    with pytest.raises(UserError, match="give one per row"):
        cross_entropy(logits, labels[:2])
