"""AdamW over lists: against float64, a weight at a time, and torch's own fused one."""

import pytest
import torch
from torch import Tensor

from tests.kernels.truth import DEVICE, DTYPES, error
from tightfit.kernels.optimizer import adamw_list as module
from tightfit.kernels.optimizer.adamw import Numbers, adamw
from tightfit.kernels.optimizer.adamw_list import adamw_list
from tightfit.kernels.optimizer.gradient_norm import gradient_norm
from tightfit.kernels.tensor_table import CHUNK
from tightfit.kernels.triton_support import Impl

SHAPES = [(1,), (37,), (0, 5), (3, 300), (CHUNK,), (CHUNK + 1,), (2, CHUNK)]


def numbers(step: int) -> Numbers:
    return Numbers(1e-2, 0.9, 0.95, 1e-8, 0.1, step)


def lists(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Weights, gradients and moments of all SHAPES, the same numbers for every dtype."""
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(shape, generator=generator).half() for shape in SHAPES for _ in range(2)]
    weights, gradients = ([x.to(DEVICE, dtype) for x in drawn[i::2]] for i in range(2))
    m, v = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    return weights, gradients, m, v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_list_is_updated_as_its_weights_are_alone(dtype: torch.dtype) -> None:
    exact, ours, alone = lists(torch.float64), lists(dtype), lists(dtype)
    factor = torch.tensor(0.25, device=DEVICE)
    for step in (1, 2, 3):
        adamw_list(*ours, factor, numbers(step), "triton")
        for side in (exact, alone):
            for w, g, m, v in zip(*side, strict=True):
                adamw(w, None, g, m, v, factor, numbers(step), "torch")
    for kind in (0, 2, 3):
        for found, plain, truth in zip(ours[kind], alone[kind], exact[kind], strict=True):
            assert found.dtype == dtype
            assert error(found, truth) <= 1.1 * error(plain, truth) + 1e-6
    assert all(error(w, start) > 1e-4 for w, start in zip(ours[0], lists(dtype)[0], strict=True) if w.numel())


def test_more_tensors_than_a_table_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    ours, alone = lists(torch.float32), lists(torch.float32)
    adamw_list(*ours, None, numbers(1), "triton")
    for w, g, m, v in zip(*alone, strict=True):
        adamw(w, None, g, m, v, None, numbers(1), "torch")
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ours[0], alone[0], strict=True))


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_a_factor_that_is_not_a_number_changes_nothing(impl: Impl) -> None:
    weights, gradients, m, v = lists(torch.float32)
    before = [x.clone() for x in (*weights, *m, *v)]
    adamw_list(weights, gradients, m, v, torch.tensor(float("nan"), device=DEVICE), numbers(1), impl)
    assert all(torch.equal(now, then) for now, then in zip((*weights, *m, *v), before, strict=True))


def test_it_is_torchs_adamw() -> None:
    weights, gradients, m, v = lists(torch.float32)
    theirs = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in (1, 2, 3):
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        adamw_list(weights, gradients, m, v, None, numbers(step), "triton")
    assert all(torch.allclose(a, b.detach(), rtol=1e-5, atol=1e-6) for a, b in zip(weights, theirs, strict=True))


def test_tensors_that_begin_at_odd_addresses_or_are_turned_take_the_plain_path() -> None:
    whole = [torch.randn(10, 7, device=DEVICE) for _ in range(4)]
    for ours, plain in (([x.flatten()[1:] for x in whole],) * 2, ([x.T for x in whole],) * 2):
        mine, others = ([x.clone(memory_format=torch.preserve_format) for x in side] for side in (ours, plain))
        if ours[0].ndim == 1:
            mine = [torch.cat([x[:1], x])[1:] for x in mine]
        mine[3].abs_(), others[3].abs_()
        adamw_list([mine[0]], [mine[1]], [mine[2]], [mine[3]], None, numbers(1), "triton")
        adamw(others[0], None, others[1], others[2], others[3], None, numbers(1), "torch")
        assert torch.allclose(mine[0], others[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_a_list(dtype: torch.dtype) -> None:
    tensors = lists(dtype)[1]
    truth = torch.cat([x.double().flatten() for x in tensors]).norm()
    found = gradient_norm(tensors, "triton")
    assert found.dtype == torch.float32
    assert found.ndim == 0
    assert float(found) == pytest.approx(float(truth), rel=1e-5)
    assert torch.equal(found, gradient_norm(tensors, "triton"))
    assert float(gradient_norm(tensors, "torch")) == pytest.approx(float(truth), rel=1e-5)


def test_norm_of_what_is_not_alike_or_not_there() -> None:
    mixed = [torch.ones(3, device=DEVICE), torch.ones(6, device=DEVICE, dtype=torch.float16), torch.ones(4, 4).T]
    assert float(gradient_norm([x.to(DEVICE) for x in mixed], "triton")) == pytest.approx(5.0)
    assert float(gradient_norm([torch.full((4,), float("nan"), device=DEVICE)], "triton")) != 0
