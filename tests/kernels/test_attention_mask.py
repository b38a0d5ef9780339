"""Who sees whom, in every form backends ask for, against one another."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.attention.attention_mask import AttentionMask

CPU = torch.device("cpu")


def packed(length: int) -> Tensor:
    first = torch.arange(length) // 5
    return torch.stack([first, torch.zeros_like(first)])


def test_plain_causal_attention_needs_no_mask_and_others_share_one() -> None:
    assert AttentionMask(9, 9, CPU).dense(None) is None
    assert AttentionMask(9, 9, CPU).dense(9) is None
    assert AttentionMask(1, 9, CPU).dense(None) is None
    mask = AttentionMask(9, 9, CPU)
    assert mask.dense(4) is mask.dense(4)
    assert mask.dense(4) is not mask.dense(5)
    for made, shape in (
        (AttentionMask(2, 9, CPU), (1, 1, 2, 9)),
        (AttentionMask(10, 10, CPU, packed(10)), (2, 1, 10, 10)),
    ):
        dense = made.dense(None)
        assert dense is not None
        assert dense.shape == shape


def test_documents_with_a_cache_before_them_are_refused() -> None:
    with pytest.raises(UserError, match="do not go together"):
        AttentionMask(4, 9, CPU, packed(4))


def test_bounds_are_where_documents_start_and_end() -> None:
    assert AttentionMask(5, 5, CPU).bounds is None
    bounds = AttentionMask(7, 7, CPU, torch.tensor([[4, 4, 4, 0, 1, 1, 4], [0] * 7])).bounds
    assert bounds is not None
    starts, ends = bounds
    assert starts.tolist() == [[0, 0, 0, 3, 4, 4, 6], [0] * 7]
    assert ends.tolist() == [[3, 3, 3, 4, 6, 6, 7], [7] * 7]


def test_a_number_that_returns_is_another_document() -> None:
    mask = AttentionMask(3, 3, CPU, torch.tensor([[1, 2, 1]])).dense(None)
    assert mask is not None
    assert mask[0, 0].tolist() == [[True, False, False], [False, True, False], [False, False, True]]


@pytest.mark.parametrize("window", [None, 1, 3, 130, 1000])
@pytest.mark.parametrize("documents", [None, packed(300) // 30, packed(300)], ids=["one", "long", "short"])
def test_block_masks_say_what_masks_do(window: int | None, documents: Tensor | None) -> None:
    mask = AttentionMask(300, 300, CPU, documents)
    block_mask = mask.block_mask(window)
    dense = mask.dense(window, explicit=True)
    assert dense is not None
    seen = dense[:, 0]
    padded = F.pad(seen, (0, 84, 0, 84))
    tiles = padded.view(-1, 3, 128, 3, 128).transpose(2, 3)
    assert torch.equal(block_mask.to_dense()[:, 0].bool(), tiles.any(-1).any(-1))
    padded[:, 300:] = True  # queries that are not there do not keep a block from being whole
    counts, columns = block_mask.full_kv_num_blocks[:, 0], block_mask.full_kv_indices[:, 0].long()
    for batch, row in torch.cartesian_prod(torch.arange(len(seen)), torch.arange(3)).tolist():
        assert all(tiles[batch, row, column].all() for column in columns[batch, row, : counts[batch, row]])
    index = torch.arange(300)
    by_function = [block_mask.mask_mod(torch.tensor(b), None, index[:, None], index) for b in range(len(seen))]
    assert torch.equal(torch.stack(by_function), seen)
