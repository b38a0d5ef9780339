"""Which layers are recomputed."""

from itertools import pairwise

import pytest

from tightfit.errors import UserError
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.checkpointing import is_checkpointed
from tightfit.levers.policy.recompute import fixed_levels, recomputed_layers


def test_counts_are_spread_evenly() -> None:
    assert sorted(recomputed_layers(8, every=0, count=4)) == [0, 2, 4, 6]
    assert sorted(recomputed_layers(8, every=0, count=3)) == [0, 2, 5]
    assert sorted(recomputed_layers(8, every=0, count=8)) == list(range(8))
    assert sorted(recomputed_layers(8, every=0, count=1)) == [0]
    for count in range(1, 33):
        layers = sorted(recomputed_layers(32, every=0, count=count))
        assert len(layers) == count
        gaps = {b - a for a, b in pairwise([*layers, 32])}
        assert max(gaps) - min(gaps) <= 1


def test_every_nth_layer_of_the_model_whatever_rank_has_it() -> None:
    levels = fixed_levels(range(5, 10), model_layers=12, every=4, count=0, keep="attention")
    assert levels == ("everything", "everything", "everything", "attention", "everything")
    assert recomputed_layers(12, every=0, count=0) == set()


def test_more_checkpoints_than_layers_get_a_sentence() -> None:
    with pytest.raises(UserError, match="num_checkpoints is 9, but the model has 8 layers; give at most that many"):
        recomputed_layers(8, every=0, count=9)


def test_any_of_three_settings_checkpoints() -> None:
    assert not is_checkpointed(Levers())
    for name, value in (("checkpoint_every", 2), ("num_checkpoints", 1), ("checkpoint_budget_bytes", 0)):
        assert is_checkpointed(Levers.model_validate({name: value}))
