"""The routed MLP in grouped products, against float64 and one expert after another."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import sampled
from tests.kernels.truth import DEVICE, DTYPES, HAS_GPU, assert_no_worse, both_ways
from tightfit.errors import UserError
from tightfit.kernels.experts.routed_mlp import route, routed_mlp, routed_mlp_eager
from tightfit.kernels.recomputation import result_unwanted

TOKENS, SIZE, WIDTH, EXPERTS, PER_TOKEN = 331 if HAS_GPU else 13, 24, 40, 4, 2
"""On a GPU enough tokens for their mean error to say something; the interpreter is slow."""


def tensors(dtype: torch.dtype, tokens: int = TOKENS, per_token: int = PER_TOKEN) -> list[Tensor]:
    wide, narrow = (EXPERTS, WIDTH, SIZE), (EXPERTS, SIZE, WIDTH)
    shapes = [(tokens, SIZE), (tokens, per_token), wide, wide, narrow]
    return [torch.randn(shape, dtype=torch.float64, device=DEVICE).to(dtype) for shape in shapes]


def chosen(kind: str, tokens: int = TOKENS, per_token: int = PER_TOKEN) -> Tensor:
    """Experts of each token: any, all tokens to the same ones, or none to some."""
    few = {"any": EXPERTS, "hot": per_token, "empty": per_token + 1}[kind]
    generator = torch.Generator().manual_seed(2)
    return torch.rand(tokens, few, generator=generator).argsort(-1)[:, :per_token].to(DEVICE)


def ours(experts: Tensor, activation: Any = "silu", impl: Any = "triton") -> Any:
    return lambda x, w, gate, up, down: routed_mlp(x, w, route(experts, EXPERTS), gate, up, down, activation, impl=impl)


def eager(experts: Tensor, activation: Any = "silu") -> Any:
    return lambda x, w, gate, up, down: routed_mlp_eager(x, w, experts, gate, up, down, activation)


@pytest.mark.parametrize("kind", ["any", "hot", "empty"])
def test_rows_are_sorted_by_expert_and_found_again(kind: str) -> None:
    experts = chosen(kind)
    routing = route(experts, EXPERTS)
    by_row = experts.flatten()[routing.rows.flatten().argsort()]
    assert (by_row.diff() >= 0).all()
    assert torch.equal(routing.tokens[routing.rows], torch.arange(TOKENS, device=DEVICE)[:, None].expand(-1, PER_TOKEN))
    assert routing.offsets.tolist() == torch.bincount(experts.flatten().cpu(), minlength=EXPERTS).cumsum(0).tolist()


@sampled(4)
@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(
    ("dtype", "kind"), [*((dtype, "any") for dtype in DTYPES), (torch.float32, "hot"), (torch.float32, "empty")]
)
def test_no_worse_than_one_expert_after_another(dtype: torch.dtype, kind: str, impl: str) -> None:
    given, experts = tensors(dtype), chosen(kind)
    found = both_ways(ours(experts, impl=impl), given, dtype)
    reference, truth = (both_ways(eager(experts), given, to) for to in (dtype, torch.float64))
    assert_no_worse(found, reference, truth)


def kept_pairs(experts: Tensor, capacity: int) -> Tensor:
    """Whether a pair finds room, [N, k]: first choices of all tokens, then second ones, each in the order of tokens."""
    taken, kept = [0] * EXPERTS, torch.zeros_like(experts, dtype=torch.bool)
    for j in range(experts.shape[1]):
        for token, expert in enumerate(experts[:, j].tolist()):
            kept[token, j] = taken[expert] < capacity
            taken[expert] += 1
    return kept


@sampled(4)
@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(("kind", "capacity"), [("any", 5), ("hot", 3), ("empty", 1), ("any", 1000)])
def test_experts_take_no_more_than_their_capacity(kind: str, capacity: int, impl: Any) -> None:
    given, experts = tensors(torch.float32), chosen(kind)
    kept, routing = kept_pairs(experts, capacity), route(experts, EXPERTS, capacity)
    assert torch.equal(routing.rows >= 0, kept)
    assert len(routing.tokens) == min(experts.numel(), EXPERTS * capacity)
    assert routing.load.tolist() == torch.bincount(experts.flatten().cpu(), minlength=EXPERTS).tolist()

    def limited(x: Tensor, w: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return routed_mlp(x, w, routing, gate, up, down, impl=impl)

    def zeroed(x: Tensor, w: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return routed_mlp_eager(x, w * kept, experts, gate, up, down)

    found = both_ways(limited, given, torch.float32)
    reference, truth = (both_ways(zeroed, given, to) for to in (torch.float32, torch.float64))
    assert_no_worse(found, reference, truth)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_biases_of_dropped_pairs_are_not_added(impl: Any) -> None:
    experts = chosen("hot")
    kept, routing = kept_pairs(experts, 3), route(experts, EXPERTS, 3)
    shapes = [(EXPERTS, WIDTH), (EXPERTS, WIDTH), (EXPERTS, SIZE)]
    leaves = [*tensors(torch.float32), *(torch.randn(shape, device=DEVICE) for shape in shapes)]
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def limited(x: Tensor, w: Tensor, gate: Tensor, up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        return routed_mlp(x, w, routing, gate, up, down, biases=(biases[0], biases[1], biases[2]), impl=impl)

    def one_by_one(x: Tensor, w: Tensor, gate: Tensor, up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        rows = []
        for token, row in enumerate(experts.tolist()):
            made = torch.zeros_like(x[0])
            for j, e in enumerate(row):
                inner = torch.nn.functional.silu(gate[e] @ x[token] + biases[0][e]) * (up[e] @ x[token] + biases[1][e])
                made = made + w[token, j] * kept[token, j] * (down[e] @ inner + biases[2][e])
            rows.append(made)
        return torch.stack(rows)

    made = [run(*leaves) for run in (limited, one_by_one)]
    gradient = torch.randn_like(made[0])
    found, wanted = ([y, *torch.autograd.grad(y, leaves, gradient)] for y in made)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@sampled(3)
@pytest.mark.parametrize("activation", ["gelu_tanh", "relu2", "swiglu_clamped"])
def test_activations(activation: str) -> None:
    given, experts = tensors(torch.float32), chosen("any")
    found = both_ways(ours(experts, activation), given, torch.float32)
    reference, truth = (both_ways(eager(experts, activation), given, to) for to in (torch.float32, torch.float64))
    assert_no_worse(found, reference, truth)


@sampled(2)
@pytest.mark.parametrize("frozen", [(0,), (1, 2, 3), (4,)], ids=str)
def test_only_the_gradients_that_are_asked_for(frozen: tuple[int, ...]) -> None:
    experts = chosen("any")
    leaves = [t.clone().requires_grad_(i not in frozen) for i, t in enumerate(tensors(torch.float32))]
    wanted = [t for i, t in enumerate(leaves) if i not in frozen]
    found, reference = (torch.autograd.grad(run(*leaves).sum(), wanted) for run in (ours(experts), eager(experts)))
    torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-4)


def test_a_kept_graph_can_be_used_again_and_gives_the_same_bits() -> None:
    leaves = [t.requires_grad_() for t in tensors(torch.float32)]
    y = ours(chosen("any"))(*leaves)
    gradient = torch.randn_like(y)
    first = torch.autograd.grad(y, leaves, gradient, retain_graph=True)
    second = torch.autograd.grad(y, leaves, gradient)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_stays_for_backward() -> None:
    """x, gate and up of every row, the weights, and where rows come from: no copies of tokens, no experts' results."""
    leaves = [t.requires_grad_() for t in tensors(torch.float32)]
    rows, kept = TOKENS * PER_TOKEN, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        ours(chosen("any"))(*leaves).sum().backward()
    assert kept.count((rows, WIDTH)) == 2
    assert (rows, SIZE) not in kept


def test_a_result_that_nobody_wants_is_not_computed() -> None:
    leaves = [t.requires_grad_() for t in tensors(torch.float32)]
    run = ours(chosen("any"))
    whole = run(*leaves)
    with result_unwanted():
        undone = run(*leaves)
    gradient = torch.randn_like(whole)
    assert undone.untyped_storage().nbytes() < whole.untyped_storage().nbytes()
    for a, b in zip(*(torch.autograd.grad(y, leaves, gradient) for y in (whole, undone)), strict=True):
        assert torch.equal(a, b)


def test_no_tokens() -> None:
    leaves = [t.requires_grad_() for t in tensors(torch.float32, tokens=0)]
    ours(chosen("any", tokens=0))(*leaves).sum().backward()
    assert all((leaf.grad == 0).all() for leaf in leaves)


def test_shapes_and_dtypes_that_do_not_fit() -> None:
    x, w, gate, up, down = tensors(torch.float32)
    routing = route(chosen("any"), EXPERTS)
    for bad in ((x, w, gate, up, gate), (x[:, 1:], w, gate, up, down), (x, w.half(), gate, up, down)):
        with pytest.raises(UserError, match=r"routed_mlp got .*; give x \[N, H\]"):
            routed_mlp(bad[0], bad[1], routing, *bad[2:])
