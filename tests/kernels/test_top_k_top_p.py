"""Top-k and top-p against a sort in float64: rows with settings of their own, equal probabilities, zeros."""

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.truth import DEVICE
from tightfit.kernels.decoding.top_k_top_p import BLOCK, FIRST_LOOK, top_k_top_p
from tightfit.kernels.triton_support import Impl

IMPLS: list[Impl] = ["triton", "torch"]
VOCABULARY = 2 * BLOCK + 7


def cut(row: Tensor, k: int, p: float) -> Tensor:
    """One row by the definition, of equal probabilities the first."""
    ordered, index = row.double().sort(descending=True, stable=True)
    kept = torch.zeros_like(ordered)
    kept[:k] = ordered[:k]
    before = kept.cumsum(-1) - kept
    if p < 1:
        kept[before >= p * kept.sum()] = 0
    return torch.zeros_like(kept).scatter_(-1, index, kept / kept.sum())


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, device=DEVICE)[:, None]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("given", ["k", "p", "k and p"])
def test_rows_keep_what_a_sort_keeps(given: str, spread: float, impl: Impl) -> None:
    torch.manual_seed(int(spread))
    ks = [1, 2, 17, VOCABULARY - 1, VOCABULARY, 50]
    ps = [0.93, 0.5, 1e-6, 1.0, 0.9999, 0.1]
    chances = (spread * torch.randn(len(ks), VOCABULARY, device=DEVICE)).softmax(-1)
    ks = ks if "k" in given else [VOCABULARY] * len(ks)
    ps = ps if "p" in given else [1.0] * len(ps)
    made = top_k_top_p(chances, column([*map(float, ks)]) if "k" in given else None, column(ps), impl=impl)
    for row, whole, k, p in zip(made, chances, ks, ps, strict=True):
        wanted = cut(whole, k, p)
        assert torch.equal(row > 0, wanted > 0)
        torch.testing.assert_close(row.double(), wanted, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("impl", IMPLS)
def test_of_equal_probabilities_only_as_many_as_needed_are_kept(impl: Impl) -> None:
    width = 4 * FIRST_LOOK if impl == "torch" else VOCABULARY
    flat = torch.full((3, width), 1 / width, device=DEVICE)
    flat[2, : width // 2] *= 0.5
    made = top_k_top_p(flat, column([5.0, width, width - 3]), column([1.0, 0.75, 0.505]), impl=impl)
    last = width - width // 2  # the likelier ones of the last row
    share_of_kept = 0.505 * (last + 0.5 * (width - 3 - last))
    assert (made > 0).sum(-1).tolist() == [5, math.ceil(width * 3 / 4), math.ceil(share_of_kept)]
    torch.testing.assert_close(made.sum(-1), torch.ones(3, device=DEVICE))


@pytest.mark.parametrize("impl", IMPLS)
def test_tokens_without_any_chance_stay_without(impl: Impl) -> None:
    chances = torch.zeros(3, VOCABULARY, device=DEVICE)
    chances[:, [3, VOCABULARY - 1]] = torch.tensor([0.25, 0.75], device=DEVICE)
    made = top_k_top_p(chances, column([9.0, 1.0, 9.0]), column([0.999, 1.0, 0.7]), impl=impl)
    assert made[:, [3, VOCABULARY - 1]].tolist() == [[0.25, 0.75], [0.0, 1.0], [0.0, 1.0]]
    assert (made > 0).sum().item() == 4


def test_of_equal_ones_the_kernel_keeps_the_first() -> None:
    chances = torch.full((2, VOCABULARY), 1 / VOCABULARY, device=DEVICE)
    made = top_k_top_p(chances, column([3.0, VOCABULARY]), column([1.0, 2.5 / VOCABULARY]), impl="triton")
    assert made.nonzero().tolist() == [[row, token] for row in range(2) for token in range(3)]
