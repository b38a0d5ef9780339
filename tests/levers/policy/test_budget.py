"""The knapsack of kept activations, against trying every choice."""

from collections.abc import Hashable
from itertools import product

import pytest

from tightfit.errors import UserError
from tightfit.levers.policy.budget import KeepOption, cheapest, cheapest_levels


def test_kinds_with_options_of_any_sizes() -> None:
    """Bytes and seconds without any pattern, three kinds."""
    options = [
        [KeepOption((7 * k + 13 * level**2) % 31, ((5 * k + 3) * (4 - level) ** 2) % 17 / 7) for level in range(4)]
        for k in range(3)
    ]
    counts = [2, 3, 1]
    singles = [options[kind] for kind, count in enumerate(counts) for _ in range(count)]
    every = [(sum(o.bytes for o in each), sum(o.seconds for o in each)) for each in product(*singles)]
    for budget in range(0, 140, 3):
        fitting = [seconds for size, seconds in every if size <= budget]
        found = cheapest(options, counts, budget)
        assert (found is None) == (not fitting)
        if found is not None:
            assert found.seconds == pytest.approx(min(fitting))
            assert [sum(dealt) for dealt in found.counts] == counts


def test_layers_that_keep_less_come_first() -> None:
    """One option keeps nothing and takes a second, the others keep a byte and take none."""
    options: dict[Hashable, list[KeepOption]] = {
        kind: [KeepOption(0, 1.0), *[KeepOption(1, 0.0)] * 3] for kind in ("dense", "routed")
    }
    levels = cheapest_levels(["dense", "routed", "dense", "routed"], options, budget_bytes=3, always_bytes=1)
    assert [level == "nothing" for level in levels].count(True) == 2
    for kind in (0, 1):
        kept = [level != "nothing" for level in levels[kind::2]]
        assert kept == sorted(kept)


def test_a_budget_below_the_inputs_names_what_they_take() -> None:
    options: dict[Hashable, list[KeepOption]] = {
        "dense": [KeepOption(10, 1.0), KeepOption(20, 0.5), KeepOption(30, 0.1), KeepOption(40, 0.0)]
    }
    assert cheapest_levels(["dense"] * 3, options, budget_bytes=30) == ("nothing",) * 3
    with pytest.raises(UserError, match="is 34, but the inputs of 3 layers alone take 35; give at least"):
        cheapest_levels(["dense"] * 3, options, budget_bytes=34, always_bytes=5)
