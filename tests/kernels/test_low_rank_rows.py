"""What adapters add to rows of a product: several in one step, of different ranks, of some projections only."""

import pytest
import torch
from torch import Tensor

from tests.kernels.truth import DEVICE
from tightfit.kernels.decoding.low_rank_rows import LowRankRows, Pair, low_rank_rows, low_rank_rows_eager

ADAPTER_OF = [1, -1, 0, 2, 2, -1, 0]


def matrices(ranks: list[list[int]], outputs: tuple[int, ...], inputs: int, dtype: torch.dtype) -> LowRankRows:
    """Random ones; rank 0 stands for a projection that is left alone."""

    def pair(rank: int, size: int) -> Pair | None:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=DEVICE).to(dtype)

        return (random(rank, inputs), random(size, rank)) if rank else None

    return LowRankRows.of([[pair(r, size) for r, size in zip(each, outputs, strict=True)] for each in ranks], outputs)


def added(x: Tensor, given: LowRankRows, adapter_of: list[int]) -> Tensor:
    """In float64, a row after the other."""
    rows = []
    for row, adapter in zip(x.double(), adapter_of, strict=True):
        parts = [row.new_zeros(size) for size in given.outputs]
        for index, pair in enumerate(given.pairs[adapter] if adapter >= 0 else ()):
            if pair is not None:
                parts[index] = pair[1].double() @ (pair[0].double() @ row)
        rows.append(torch.cat(parts))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("ranks", "outputs", "inputs"),
    [
        ([[3, 0, 3], [0, 3, 0], [3, 3, 3]], (40, 24, 24), 33),
        ([[8, 1, 5], [0, 0, 0], [2, 17, 0]], (16, 8, 8), 64),
        ([[4], [16], [0]], (130,), 16),
    ],
)
def test_rows_get_what_their_adapter_adds(
    ranks: list[list[int]], outputs: tuple[int, ...], inputs: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    given = matrices(ranks, outputs, inputs, dtype)
    x = torch.randn(len(ADAPTER_OF), inputs, device=DEVICE).to(dtype)
    y = torch.randn(len(ADAPTER_OF), sum(outputs), device=DEVICE).to(dtype)
    wanted = y.double() + added(x, given, ADAPTER_OF)
    adapter_of = torch.tensor(ADAPTER_OF, device=DEVICE)
    by_kernel, by_torch, by_rows = y.clone(), y.clone(), y.clone()
    low_rank_rows(by_kernel, x, adapter_of, given, impl="triton")
    low_rank_rows(by_torch, x, adapter_of, given, impl="torch")
    low_rank_rows_eager(by_rows, x, {a: (adapter_of == a).nonzero()[:, 0] for a in range(3)}, given)
    assert torch.equal(by_torch, by_rows)
    error, eager = ((found.double() - wanted).abs().max() for found in (by_kernel, by_torch))
    assert error <= 1.1 * eager + 1e-5, "no worse than two products and a sum"
    untouched = adapter_of < 0
    assert torch.equal(by_kernel[untouched], y[untouched])
    assert not torch.equal(by_kernel[0], y[0]) or not any(ranks[1])


def test_what_cannot_be_read_in_place_is_copied() -> None:
    whole = torch.randn(9, 7, device=DEVICE)
    down, up = whole[1:3], torch.randn(4, 5, device=DEVICE)[:, :2]
    given = LowRankRows.of([[(down, up)]], (4,))
    x, y = torch.randn(2, 7, device=DEVICE), torch.zeros(2, 4, device=DEVICE)
    low_rank_rows(y, x, torch.zeros(2, dtype=torch.int64, device=DEVICE), given, impl="triton")
    torch.testing.assert_close(y, x @ down.T @ up.T)
