"""The likeliest token of a row, by many programs."""

import pytest
import torch

from tests.kernels.truth import DEVICE
from tightfit.kernels.decoding.greedy import CHUNK, choose_greedily


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [CHUNK - 1, CHUNK, 5 * CHUNK + 7])
def test_it_is_the_first_of_the_highest(vocabulary: int, dtype: torch.dtype) -> None:
    logits = torch.randn(4, vocabulary, device=DEVICE).to(dtype)
    logits[1, [3, vocabulary - 1]] = 9.0  # of equal ones the first
    logits[2] = -torch.inf
    logits[2, vocabulary // 2] = -50.0
    last, slots = torch.zeros(9, dtype=torch.int64, device=DEVICE), torch.tensor([7, 2, 0, 5], device=DEVICE)
    counters = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    for _ in range(2):  # counters are zero again
        tokens = choose_greedily(logits, last, slots, counters)
        wanted = [int((row == row.max()).nonzero()[0, 0]) for row in logits.float()]
        assert tokens.tolist() == wanted
        assert last[slots].tolist() == wanted
        assert last[[1, 3, 4, 6, 8]].eq(0).all()
        assert not counters.any()
