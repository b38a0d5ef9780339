"""The fewest tiles that fit: one tile of them does, and of one fewer it would not."""

import pytest

from tightfit.errors import UserError
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.tiles import tile_bytes
from tightfit.models.presets import preset
from tightfit.plan.seconds.tiles import tile_count

SPEC = preset("llama-3.1-8b")


@pytest.mark.parametrize("free_gib", [0.25, 1, 3.7, 20, 1000])
@pytest.mark.parametrize(("rows", "length"), [(1, 524_288), (2, 100_000), (4, 8192)])
def test_the_fewest_that_fit(rows: int, length: int, free_gib: float) -> None:
    free_bytes = int(free_gib * 2**30)
    found = tile_count(SPEC, rows, length, 2, free_bytes)

    def needed(tiles: int) -> int:
        return rows * tile_bytes(SPEC, LocalShape(1, length, 2, tiles=tiles))

    assert needed(found) <= free_bytes
    assert found == 1 or needed(found - 1) > free_bytes


def test_half_a_million_tokens_in_four_gibibytes() -> None:
    """An 8B layer: 3 × 14336 + 4 × 4096 numbers of two bytes for each token of a tile."""
    per_token = 2 * (3 * 14336 + 4 * 4096)
    longest = 4 * 2**30 // per_token
    assert tile_count(SPEC, 1, 524_288, 2, 4 * 2**30) == -(-524_288 // longest) == 15


def test_too_little_for_one_token_is_said() -> None:
    with pytest.raises(UserError, match="1000 bytes are free, but a tile of one token in each of 8 rows takes"):
        tile_count(SPEC, 8, 4096, 2, 1000)
