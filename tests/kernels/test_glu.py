"""Gated activations' kernel against float64 and plain torch; strides, gradients written over the inputs."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import covering, sampled
from tests.kernels.truth import DEVICE, DTYPES, assert_no_worse, both_ways
from tightfit.errors import UserError
from tightfit.kernels.mlp.glu import ACTIVATIONS, glu, glu_eager, relu2

SHAPES = [(1, 1), (3, 5, 7), (2, 2100), (4, 1024)]


def pair(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return list((2 * torch.randn(2, *shape, dtype=torch.float64, device=DEVICE)).to(dtype))


CASES = list(product(DTYPES, ACTIVATIONS, SHAPES))


@sampled(3)
@pytest.mark.parametrize(("dtype", "activation", "shape"), covering(CASES, pairs=True), ids=str)
def test_no_worse_than_eager(dtype: torch.dtype, activation: Any, shape: tuple[int, ...]) -> None:
    tensors = pair(shape, dtype)
    eager, truth = (both_ways(lambda g, u: glu_eager(g, u, activation), tensors, to) for to in (dtype, torch.float64))
    for overwrite in (False, True):
        found = both_ways(
            # Leaves are not written over: the copies stand for what projections return.
            lambda g, u, overwrite=overwrite: glu(g * 1, u * 1, activation, overwrite=overwrite, impl="triton"),
            tensors,
            dtype,
        )
        assert_no_worse(found, eager, truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu2(dtype: torch.dtype) -> None:
    tensors = pair((3, 701), dtype)[:1]
    found = both_ways(lambda x: relu2(x, impl="triton"), tensors, dtype)
    eager, truth = (both_ways(lambda x: relu2(x, impl="torch"), tensors, to) for to in (dtype, torch.float64))
    assert_no_worse(found, eager, truth)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_far_from_zero(activation: Any) -> None:
    gate = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4], device=DEVICE, requires_grad=True)
    found, wanted = (
        torch.autograd.grad(run(gate, torch.ones_like(gate), activation), gate, torch.ones_like(gate))[0]
        for run in (lambda *a: glu(*a, impl="triton"), glu_eager)
    )
    assert torch.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("overwrite", [False, True])
def test_halves_of_one_projection(overwrite: bool) -> None:
    both = torch.randn(2, 9, 30, device=DEVICE, requires_grad=True)

    def run(both: Tensor, impl: str) -> Tensor:
        return glu(*(both * 1).chunk(2, dim=-1), overwrite=overwrite, impl=impl)  # type: ignore[arg-type]

    gradient = torch.randn(9, 2, 15, device=DEVICE).transpose(0, 1)
    found, wanted = (torch.autograd.grad(run(both, impl), both, gradient)[0] for impl in ("triton", "torch"))
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["transposed", "expanded", "empty"])
def test_strides_that_cannot_be_written_over(name: str) -> None:
    gate = torch.randn(6, 5, 8, device=DEVICE, requires_grad=True)
    view = {
        "transposed": lambda x: x.transpose(0, 2),
        "expanded": lambda x: x[:1].expand(4, 5, 8),
        "empty": lambda x: x[:0],
    }
    up = torch.randn(view[name](gate).shape, device=DEVICE)
    found, wanted = (
        torch.autograd.grad(glu(view[name](gate), up, overwrite=True, impl=impl).square().sum(), gate)[0]
        for impl in ("triton", "torch")
    )
    assert torch.allclose(found, wanted, atol=1e-5)


def test_overwriting_saves_memory_and_refuses_a_second_backward_pass() -> None:
    gate, up = (t.requires_grad_() for t in pair((4, 6), torch.float32))
    made_gate, made_up = gate * 1, up * 1
    y = glu(made_gate, made_up, overwrite=True, impl="triton")
    d_gate, d_up = torch.autograd.grad(y.sum(), (gate, up), retain_graph=True)
    assert torch.equal(made_gate, d_gate)
    assert torch.equal(made_up, d_up)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), (gate, up))


def test_leaves_are_never_overwritten() -> None:
    gate, up = (t.requires_grad_() for t in pair((4, 6), torch.float32))
    before = gate.detach().clone()
    glu(gate, up, overwrite=True, impl="triton").sum().backward()
    assert torch.equal(gate, before)


def test_gate_and_up_may_be_one_tensor() -> None:
    x = torch.randn(5, 6, device=DEVICE, requires_grad=True)

    def run(x: Tensor, impl: str) -> Tensor:
        made = x * 1
        return glu(made, made, overwrite=True, impl=impl).sum()  # type: ignore[arg-type]

    found, wanted = (torch.autograd.grad(run(x, impl), x)[0] for impl in ("triton", "torch"))
    assert torch.allclose(found, wanted, atol=1e-5)


def test_registered_properly() -> None:
    gate, up = (t.requires_grad_() for t in pair((3, 5), torch.float32))
    torch.library.opcheck(torch.ops.tightfit.glu.default, (gate, up, "silu", False))
    torch.library.opcheck(torch.ops.tightfit.glu.default, (gate, None, "relu2", False))
    torch.library.opcheck(
        torch.ops.tightfit.glu_backward_.default, (up.detach(), gate.detach(), up.detach() + 1, "silu")
    )


def test_inside_compile_and_checkpoint() -> None:
    gate, up = (t.requires_grad_() for t in pair((3, 5), torch.float32))

    def block(gate: Tensor, up: Tensor) -> Tensor:
        return glu(gate * 1, up * 1, overwrite=True, impl="triton").square().sum()

    wanted = torch.autograd.grad(block(gate, up), (gate, up))
    for way in (
        lambda: torch.utils.checkpoint.checkpoint(block, gate, up, use_reentrant=False),
        lambda: torch.compile(block, backend="aot_eager", fullgraph=True)(gate, up),
    ):
        for a, b in zip(torch.autograd.grad(way(), (gate, up)), wanted, strict=True):
            assert torch.allclose(a, b, atol=1e-5)


def test_refused() -> None:
    with pytest.raises(UserError, match="'swish'; give one of silu, gelu, gelu_tanh, relu2"):
        glu(torch.ones(2), torch.ones(2), "swish")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"gate has shape \(2,\) and up \(3,\)"):
        glu(torch.ones(2), torch.ones(3))
