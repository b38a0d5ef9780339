"""Projection and cross entropy in chunks against all logits at once, and against finite differences."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests.covering import sampled
from tests.kernels.truth import DEVICE, DTYPES, HAS_GPU, assert_no_worse, error
from tightfit.errors import UserError
from tightfit.kernels.loss import linear_cross_entropy as module
from tightfit.kernels.loss.linear_cross_entropy import (
    IGNORE,
    LossDetails,
    linear_cross_entropy,
    linear_cross_entropy_eager,
    rows_at_a_time,
)
from tightfit.kernels.loss.logit_chunks import read_chunks
from tightfit.kernels.loss.logit_rows import IGNORED
from tightfit.kernels.loss.sharded_weight import Projection
from tightfit.kernels.scaled_copy import scaled_copy
from tightfit.levers.policy.loss_chunks import ALIGNMENT, chunk_rows

ROWS, HIDDEN, VOCAB = 11, 9, 37
ROW_BYTES = 2 * 8 * ALIGNMENT
"""At most: 37 logits padded to 64, in float64, and once more for torch's softmax. Chunks are tests' own to choose."""
TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "smoothed": {"label_smoothing": 0.1},
    "scaled": {"scale": 0.5, "z_loss": 0.01},
    "everything": {"softcap": 2.0, "scale": 1.5, "z_loss": 0.01, "label_smoothing": 0.2, "bias": True},
}
WAYS = [("torch", torch.float64), ("torch", torch.float32), *(("triton", dtype) for dtype in DTYPES)]


def inputs(dtype: torch.dtype = torch.float64, rows: int = ROWS, bias: bool = False) -> list[Tensor]:
    """Hidden states, weight and, if wanted, bias, the same numbers in every format that holds them."""
    generator = torch.Generator().manual_seed(rows)
    shapes = [(rows, HIDDEN), (VOCAB, HIDDEN), *([(VOCAB,)] if bias else [])]
    made = [
        torch.randn(shape, generator=generator).to(torch.float16 if dtype != torch.bfloat16 else dtype)
        for shape in shapes
    ]
    return [x.to(DEVICE, dtype).requires_grad_() for x in made]


def labels_of(rows: int = ROWS) -> Tensor:
    labels = torch.randint(0, VOCAB, (rows,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    labels[::5] = IGNORE
    return labels


def loss_and_grads(
    impl: Any, tensors: list[Tensor], rows: int = 4, factor: float = 2.0, **options: Any
) -> list[Tensor]:
    """The loss, and gradients of `factor` times it: a power of two, so that multiplying rounds nothing."""
    hidden, weight, *bias = tensors
    if options.pop("bias", False):
        options["bias"] = bias[0]
    loss = linear_cross_entropy(
        hidden, weight, labels_of(len(hidden)), chunk_bytes=ROW_BYTES * rows, impl=impl, **options
    )
    weights = torch.linspace(0.5, 1.5, loss.numel(), device=DEVICE).to(loss.dtype).view(loss.shape)
    return [loss, *torch.autograd.grad((loss * weights).sum() * factor, tensors)]


def compare(impl: str, dtype: torch.dtype, rows: int = 4, **options: Any) -> None:
    tensors = inputs(dtype, bias=options.get("bias", False))
    exact = loss_and_grads("eager", [x.detach().double().requires_grad_() for x in tensors], **options)
    eager = loss_and_grads("eager", tensors, **options)
    found = loss_and_grads(impl, tensors, rows, **options)
    if dtype == torch.float64:
        assert all(error(x, truth) < 1e-13 for x, truth in zip(found, exact, strict=True))
    else:
        assert_no_worse(found, eager, exact)


@sampled(3)
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize(("impl", "dtype"), WAYS, ids=str)
def test_every_term_in_every_format(impl: Any, dtype: torch.dtype, terms: Any) -> None:
    compare(impl, dtype, **TERMS[terms])


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("impl", "dtype"), WAYS, ids=str)
def test_reductions(impl: Any, dtype: torch.dtype, reduction: Any) -> None:
    compare(impl, dtype, reduction=reduction, softcap=1.5)


@pytest.mark.parametrize("rows", [1, 4, ROWS - 1, ROWS, 10 * ROWS])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_any_chunk_size(impl: Any, rows: int) -> None:
    compare(impl, torch.float32, rows)


@pytest.mark.parametrize("terms", TERMS)
def test_eager_is_what_the_formula_says(terms: Any) -> None:
    options = dict(TERMS[terms])
    hidden, weight, *bias = inputs(bias=options.get("bias", False))
    softcap, smoothing = options.get("softcap"), options.get("label_smoothing", 0.0)
    z = (hidden @ weight.T + (bias[0] if bias else 0)) * options.get("scale", 1.0)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    wanted = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for i, label in enumerate(labels_of()):
        if label != IGNORE:
            p = z[i].log_softmax(-1)
            wanted -= (1 - smoothing) * p[label] + smoothing * p.mean()
            wanted += options.get("z_loss", 0.0) * z[i].logsumexp(-1) ** 2
    assert loss_and_grads("eager", inputs(bias=bool(bias)), **options)[0].item() == pytest.approx(wanted.item())


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_gradients_by_finite_differences(reduction: Any) -> None:
    """Of a few tokens and words: each element of each input is moved."""
    hidden, weight, bias = (x.detach() for x in inputs(rows=4, bias=True))
    tensors = [x.clone().requires_grad_() for x in (hidden[:, :3], weight[:7, :3], bias[:7])]
    labels = labels_of(4)
    labels[labels != IGNORE] %= 7

    def chunked(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias=bias,
            softcap=1.5,
            z_loss=0.1,
            label_smoothing=0.1,
            reduction=reduction,
            chunk_bytes=ROW_BYTES * 3,
            impl="torch",
        )

    assert torch.autograd.gradcheck(chunked, tensors)


@pytest.mark.parametrize("divisor", [13, 13.0, torch.tensor(13), torch.tensor([13.0])], ids=str)
def test_divisor(divisor: Any) -> None:
    whole, part = loss_and_grads("torch", inputs()), loss_and_grads("torch", inputs(), divisor=divisor)
    assert all(torch.allclose(a, 13 * b) for a, b in zip(whole, part, strict=True))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_details(impl: Any) -> None:
    hidden, weight = inputs(torch.float32)
    with torch.no_grad():
        weight[5] = hidden[1] * 10  # row 1's largest logit
    labels = labels_of()
    labels[1], labels[2] = 5, (hidden[2] @ weight.T).argmin()
    details = LossDetails()
    loss = linear_cross_entropy(hidden.view(1, ROWS, HIDDEN), weight, labels[None], details=details, impl=impl)
    logits = hidden @ weight.T
    assert details.losses is not None
    assert details.correct is not None
    assert details.logsumexp is not None
    assert details.losses.shape == details.correct.shape == details.logsumexp.shape == (1, ROWS)
    assert torch.allclose(details.losses[0], F.cross_entropy(logits, labels, reduction="none"), atol=1e-5)
    assert torch.equal(details.correct[0], logits.argmax(-1) == labels)
    assert details.correct[0, 1]
    assert not details.correct[0, 2]
    counted = labels != IGNORE
    assert torch.allclose(details.logsumexp[0, counted], logits.logsumexp(-1)[counted])
    assert loss.requires_grad
    assert not details.losses.requires_grad


@pytest.mark.parametrize("impl", ["torch", "triton", "eager"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_all_labels_ignored(impl: Any, reduction: Any) -> None:
    hidden, weight = inputs(torch.float32)
    labels = torch.full((ROWS,), IGNORE, device=DEVICE)
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction, impl=impl)
    assert loss == 0
    assert all(g.abs().sum() == 0 for g in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_ignored_rows_get_no_gradient(impl: Any) -> None:
    _, d_hidden, _ = loss_and_grads(impl, inputs(torch.float32), softcap=1.5)
    ignored = labels_of() == IGNORE
    assert d_hidden[ignored].abs().max() == 0
    assert d_hidden[~ignored].abs().min(dim=1).values.min() > 0


def test_another_ignored_label() -> None:
    hidden, weight = inputs()
    labels = labels_of().clamp(min=0)
    wanted = F.cross_entropy(hidden @ weight.T, labels, ignore_index=0, reduction="sum")
    assert linear_cross_entropy(hidden, weight, labels, ignore_index=0).item() == pytest.approx(wanted.item())


@pytest.mark.parametrize("label", [-1, -2, -101])
@pytest.mark.parametrize("group", ["", "of all ranks"])
def test_a_negative_label_shows_unless_it_is_the_one_to_ignore(label: int, group: str) -> None:
    """Data that marks what does not count in another way trained on it, as if each such token had a logit of 0."""
    hidden, weight = torch.ones(2, 4), torch.ones(8, 4)
    at = Projection(hidden, weight, None, 16, 8, group) if group else Projection(hidden, weight, None, 8)
    labels = torch.tensor([label, -100, 9 if group else 1])
    assert at.targets(labels, -100).tolist() == [8, IGNORED, 1]
    if not group:
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            linear_cross_entropy(hidden, weight, torch.tensor([1, label]), impl="torch")
        assert linear_cross_entropy(hidden, weight, torch.tensor([1, label]), impl="torch", ignore_index=label) > 0


def test_a_label_beyond_the_vocabulary_shows() -> None:
    hidden, weight = inputs(torch.float32)
    labels = labels_of()
    labels[3] = VOCAB
    assert linear_cross_entropy(hidden, weight, labels, impl="triton").isnan()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_frozen_inputs_cost_nothing(frozen: str, reduction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(zip(("hidden", "weight"), inputs(), strict=True))
    trained = "weight" if frozen == "hidden" else "hidden"
    wanted = dict(zip(given, loss_and_grads("eager", list(given.values()), reduction=reduction)[1:], strict=True))
    given[frozen] = given[frozen].detach()
    asked: list[Any] = []
    monkeypatch.setattr(module, "read_chunks", lambda *a, **k: asked.append(a[5]) or read_chunks(*a, **k))
    loss = linear_cross_entropy(given["hidden"], given["weight"], labels_of(), reduction=reduction, impl="torch")
    weights = torch.linspace(0.5, 1.5, loss.numel(), device=DEVICE, dtype=loss.dtype).view(loss.shape)
    (found,) = torch.autograd.grad((loss * weights).sum() * 2, given[trained])
    assert torch.allclose(found, wanted[trained])
    assert not any(getattr(wish, frozen) for wish in asked)
    assert getattr(asked[-1], trained)


@pytest.mark.parametrize("grad", ["both frozen", "no_grad"])
def test_no_gradient_is_computed_where_none_is_wanted(grad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = inputs()
    wanted = linear_cross_entropy_eager(hidden, weight, labels_of()).sum().item()
    asked: list[Any] = []
    monkeypatch.setattr(module, "read_chunks", lambda *a, **k: asked.append(a[5].any) or read_chunks(*a, **k))
    with torch.set_grad_enabled(grad != "no_grad"):
        given = (hidden, weight) if grad == "no_grad" else (hidden.detach(), weight.detach())
        loss = linear_cross_entropy(*given, labels_of(), impl="torch")
    assert loss.item() == pytest.approx(wanted)
    assert not loss.requires_grad
    assert asked == [False]


def test_tied_weights_get_both_gradients() -> None:
    weight = inputs()[1].detach().requires_grad_()
    tokens, labels = torch.randint(0, VOCAB, (ROWS,), device=DEVICE), labels_of()
    found, wanted = (
        torch.autograd.grad(linear_cross_entropy(F.embedding(tokens, weight), weight, labels, impl=impl), weight)[0]
        for impl in ("torch", "eager")
    )
    assert torch.allclose(found, wanted)


def test_backward_twice_gives_the_same_twice() -> None:
    hidden, weight = inputs(torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels_of(), impl="torch")
    first = torch.autograd.grad(3 * loss, (hidden, weight), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(3 * loss, (hidden, weight))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(kept, first, second, strict=True))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_autocast_multiplies_in_its_dtype_and_returns_gradients_in_the_weights(impl: Any) -> None:
    low = torch.bfloat16 if HAS_GPU else torch.float16
    hidden, weight = inputs(torch.float32)
    exact = loss_and_grads("eager", [x.detach().double().requires_grad_() for x in (hidden, weight)])
    with torch.autocast(DEVICE.type, dtype=low):
        found = loss_and_grads(impl, [hidden, weight])
    assert [x.dtype for x in found] == [torch.float32] * 3
    assert all(1e-7 < error(a, b) < 2e-2 for a, b in zip(found, exact, strict=True))


def test_checkpointing() -> None:
    hidden, weight = inputs()
    found = checkpoint(linear_cross_entropy, hidden, weight, labels_of(), impl="torch", use_reentrant=False)
    wanted = linear_cross_entropy_eager(hidden, weight, labels_of()).sum()
    grads = (torch.autograd.grad(loss, (hidden, weight)) for loss in (found, wanted))
    assert all(torch.allclose(a, b) for a, b in zip(*grads, strict=True))


def test_functional_call() -> None:
    class Loss(torch.nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            return linear_cross_entropy(hidden, self.weight, labels_of(), bias=self.bias, impl="torch")

    hidden, weight, bias = inputs(bias=True)
    found = torch.func.functional_call(Loss(HIDDEN, VOCAB), {"weight": weight, "bias": bias}, hidden)
    wanted = linear_cross_entropy_eager(hidden, weight, labels_of(), bias=bias).sum()
    grads = (torch.autograd.grad(loss, (hidden, weight, bias)) for loss in (found, wanted))
    assert all(torch.allclose(a, b) for a, b in zip(*grads, strict=True))


def test_compiled_without_breaks_and_not_again_for_another_length() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # 5 s, of the worker that runs this alone

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda h, w, y: linear_cross_entropy(h, w, y, reduction="mean", impl="torch"), backend=counter, fullgraph=True
    )
    for rows in (8, 9, 12):
        hidden, weight = inputs(torch.float32, rows)
        found = torch.autograd.grad(compiled(hidden, weight, labels_of(rows)), (hidden, weight))
        wanted = loss_and_grads("eager", [hidden, weight], reduction="mean")[1:]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))
    assert counter.frame_count <= 2


def test_operator_is_well_formed() -> None:
    hidden, weight = inputs(torch.float32)
    one = torch.ones((), device=DEVICE)
    arguments = (labels_of().clamp(min=0), one, None, VOCAB, 0.0, 0.0, 1.0, 0.0, 7, True, True, False, False, False, "")
    torch.library.opcheck(torch.ops.tightfit.linear_cross_entropy, (hidden, weight, None, *arguments))


def test_fake_tensors_have_the_real_shapes() -> None:
    with FakeTensorMode():
        hidden = torch.empty(16384, 4096, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(128256, 4096, dtype=torch.bfloat16, requires_grad=True)
        loss = linear_cross_entropy(hidden, weight, torch.empty(16384, dtype=torch.int64))
        loss.backward()
    assert loss.shape == ()
    assert hidden.grad is not None
    assert hidden.grad.shape == hidden.shape
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


def test_batched_shapes_and_labels_at_the_ends_of_the_vocabulary() -> None:
    hidden, weight = torch.randn(2, 3, HIDDEN), torch.randn(VOCAB, HIDDEN)
    labels = torch.tensor([[0, VOCAB - 1, IGNORE], [VOCAB - 1, 0, 5]])
    wanted = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    assert linear_cross_entropy(hidden, weight, labels).item() == pytest.approx(wanted.item(), rel=1e-5)
    assert linear_cross_entropy(hidden.transpose(0, 1), weight, labels.T).item() == pytest.approx(
        wanted.item(), rel=1e-5
    )
    assert linear_cross_entropy(hidden, weight, labels, reduction="none").shape == (2, 3)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_large_logits_stay_finite(impl: Any) -> None:
    tensors = [x.detach().mul(1e3).requires_grad_() for x in inputs(torch.float32)]
    assert all(x.isfinite().all() for x in loss_and_grads(impl, tensors))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_no_rows_at_all(impl: Any) -> None:
    hidden, weight = inputs(torch.float32, rows=0)
    loss = linear_cross_entropy(hidden, weight, labels_of(0), impl=impl)
    assert loss == 0
    assert torch.autograd.grad(loss, weight)[0].abs().sum() == 0


def test_chunks_are_few_and_equal() -> None:
    assert chunk_rows(16384, 6189) == 5632
    assert chunk_rows(16384, 4096) == 4096
    assert chunk_rows(16384, 2339) == 2048
    assert chunk_rows(16384, 99999) == 16384
    assert chunk_rows(16384, 100) == 100
    assert chunk_rows(16384, 0) == 1
    assert all(chunk_rows(n, most) <= most for n in (300, 1000, 5001) for most in (128, 256, 299, 700, 4999))


def test_logits_may_stand_where_the_narrow_gradient_will() -> None:
    hidden = torch.empty(100, 64, dtype=torch.bfloat16)
    weight = torch.empty(640, 64, dtype=torch.bfloat16)
    rows = {wanted: rows_at_a_time(hidden, weight, 0, weight_gradient=wanted, triton=True) for wanted in (False, True)}
    assert rows == {False: 1, True: 64}
    assert rows_at_a_time(hidden, weight.float(), 0, weight_gradient=True, triton=True) == 1


def test_scaled_copies_round_once() -> None:
    x, factor = torch.randn(33, 7, device=DEVICE), torch.tensor([1 / 3], device=DEVICE)
    assert torch.equal(scaled_copy(x, factor, torch.bfloat16), (x * factor).bfloat16())
    assert scaled_copy(x[:0], factor, torch.float16).shape == (0, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": torch.zeros(3, dtype=torch.long)}, r"labels are \[3\]"),
        ({"weight": torch.zeros(VOCAB, 4)}, "must share their last size"),
        ({"reduction": "max"}, "reduction is 'max'"),
        ({"reduction": "mean", "divisor": 3}, "divisor divides the sum"),
        ({"divisor": 0}, "divisor is 0"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"weight_shards": "rows"}, "weight_shards is 'rows'"),
        ({"impl": "cuda"}, "impl is 'cuda'"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    hidden, weight = (x.cpu() for x in inputs(torch.float32))
    given = {"hidden": hidden, "weight": weight, "labels": labels_of().cpu()} | options
    with pytest.raises(UserError, match=message):
        linear_cross_entropy(**given)
