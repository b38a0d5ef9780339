"""Packing: everything once, nothing over the edge, close to the fewest rows."""

import random

import pytest

from tightfit.train.data.packing import best_fit


@pytest.mark.parametrize("capacity", [1, 2, 10, 100])
def test_everything_is_packed_once_and_fits(capacity: int) -> None:
    chance = random.Random(capacity)
    for count in (0, 1, 2, 30, 400):
        lengths = [chance.randint(1, capacity) for _ in range(count)]
        rows = best_fit(lengths, capacity)
        assert sorted(index for row in rows for index in row) == list(range(count))
        assert all(sum(lengths[index] for index in row) <= capacity for row in rows)
        fewest = -(-sum(lengths) // capacity)
        assert len(rows) <= 11 / 9 * max(fewest, sum(2 * length > capacity for length in lengths)) + 1


def test_the_fullest_row_that_still_fits_is_taken() -> None:
    assert best_fit([6, 5, 4, 4, 1], 10) == [[0, 2], [1, 3, 4]]
    assert best_fit([3, 7, 3, 7], 10) == [[1, 2], [3, 0]]
