"""The gated MLP that does not keep its product, against float64 and plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import sampled
from tests.kernels.truth import DEVICE, DTYPES, assert_no_worse, both_ways
from tightfit.errors import UserError
from tightfit.kernels.mlp.gated_mlp import can_fuse, gated_mlp, gated_mlp_eager
from tightfit.models.layers.mlp import Mlp
from tightfit.models.presets import preset

ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu2"]


def tensors(shape: tuple[int, ...], width: int, dtype: torch.dtype) -> Any:
    """A list: x, and the weights of gate, up and down."""
    size = shape[-1]
    sizes = [shape, (width, size), (width, size), (size, width)]
    return [torch.randn(each, dtype=torch.float64, device=DEVICE).to(dtype) for each in sizes]


@sampled(3)
@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_worse_than_eager(dtype: torch.dtype, activation: Any, impl: Any) -> None:
    given = tensors((5, 13, 37), 301, dtype)  # enough elements for their mean error to say something
    found = both_ways(lambda x, gate, up, down: gated_mlp(x, gate, up, down, activation, impl=impl), given, dtype)
    eager, truth = (
        both_ways(lambda x, gate, up, down: gated_mlp_eager(x, gate, up, down, activation), given, to)
        for to in (dtype, torch.float64)
    )
    assert_no_worse(found, eager, truth)


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (3,), (1, 2, 3)], ids=str)
def test_only_the_gradients_that_are_asked_for(frozen: tuple[int, ...]) -> None:
    given = tensors((5, 6), 9, torch.float32)
    leaves: Any = [t.clone().requires_grad_(i not in frozen) for i, t in enumerate(given)]
    wanted = [t for i, t in enumerate(leaves) if i not in frozen]
    found, eager = (
        torch.autograd.grad(run(*leaves).sum(), wanted)
        for run in (lambda *t: gated_mlp(*t, impl="triton"), gated_mlp_eager)
    )
    torch.testing.assert_close(found, eager)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_a_kept_graph_can_be_used_again(impl: Any) -> None:
    leaves: Any = [t.requires_grad_() for t in tensors((5, 6), 9, torch.float32)]
    y = gated_mlp(*leaves, impl=impl)
    gradient = torch.randn_like(y)
    first = torch.autograd.grad(y, leaves, gradient, retain_graph=True)
    second = torch.autograd.grad(y, leaves, gradient)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_stays_for_backward() -> None:
    """x, gate and up, and the weights themselves."""
    leaves: Any = [t.requires_grad_() for t in tensors((5, 6), 9, torch.float32)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        gated_mlp(*leaves, impl="triton").sum().backward()
    assert sorted(kept) == sorted([(5, 6), (5, 9), (5, 9), (9, 6), (9, 6), (6, 9)])


def test_empty() -> None:
    leaves: Any = [t.requires_grad_() for t in tensors((0, 6), 9, torch.float32)]
    gated_mlp(*leaves, impl="triton").sum().backward()
    assert all((leaf.grad == 0).all() for leaf in leaves)


def test_shapes_and_dtypes_that_do_not_fit() -> None:
    x, gate, up, down = tensors((5, 6), 9, torch.float32)
    for bad in ((x, gate, up, gate), (x[:, 1:], gate, up, down), (x, gate, up.half(), down)):
        with pytest.raises(UserError, match=r"gated_mlp got .*; give x \[\.\.\., H\] and weights"):
            gated_mlp(*bad)


def kept_of_size(count: int, run: Callable[[], Tensor]) -> int:
    """How many tensors of `count` elements `run` leaves for its backward pass."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        run()
    return kept.count(count)


def test_the_decoders_mlp_is_one_operation_where_kernels_run() -> None:
    spec = preset("tiny-llama")
    ours, plain = (Mlp(spec, 24, impl).to(DEVICE) for impl in ("triton", "torch"))
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, spec.hidden_size, device=DEVICE)
    assert kept_of_size(2 * 5 * 24, lambda: ours(x)) == 2
    assert kept_of_size(2 * 5 * 24, lambda: plain(x)) > 2
    found, wanted = (torch.autograd.grad(m(x)[0].square().sum(), list(m.parameters())) for m in (ours, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_modules_that_do_more_than_multiply_are_called() -> None:
    x, plain = torch.randn(3, 4), torch.nn.Linear(4, 4, bias=False)
    hooked, replaced = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    hooked.register_forward_hook(lambda *_: None)
    replaced.forward = lambda x: x  # type: ignore[method-assign, assignment]
    assert can_fuse(x, plain, plain)
    for other in (hooked, replaced, torch.nn.Linear(4, 4), plain.__class__(4, 4, bias=False).half(), torch.nn.ReLU()):
        assert not can_fuse(x, plain, other)
    with torch.no_grad():
        assert not can_fuse(x, plain)
