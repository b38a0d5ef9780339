"""Several sources in proportions: every row of each is seen in a pass, and the shares are those asked for."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.train.data.mixture import MOST_ROWS, Mixture
from tightfit.train.loop import run_job


class Numbers(torch.utils.data.Dataset[Any]):
    """Rows that say whose they are."""

    def __init__(self, name: str, count: int) -> None:
        self.rows = [(name, number) for number in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


@pytest.mark.parametrize(("sizes", "weights"), [((10, 10), (1, 1)), ((100, 10), (1, 3)), ((7, 50, 3), (0.2, 0.5, 0.3))])
def test_a_pass_sees_every_row_and_keeps_the_shares(sizes: tuple[int, ...], weights: tuple[float, ...]) -> None:
    parts: Any = [Numbers(str(index), size) for index, size in enumerate(sizes)]
    mixed = Mixture(parts, weights)
    seen: Any = Counter(mixed[index] for index in range(len(mixed)))
    assert len(seen) == sum(sizes), "every row of every source"
    for index, weight in enumerate(weights):
        counts = [count for (name, _), count in seen.items() if name == str(index)]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) / len(mixed) == pytest.approx(weight / sum(weights), abs=1 / len(mixed))
    with pytest.raises(IndexError):
        mixed[len(mixed)]


def test_a_weight_too_small_to_matter_is_refused() -> None:
    parts: Any = [Numbers("a", 1000), Numbers("b", 1000)]
    for smaller in (1e-9, 1e-320):
        with pytest.raises(UserError, match=rf"has {smaller:g} beside 100000.*the most are {MOST_ROWS:,}; raise"):
            Mixture(parts, [100_000, smaller])


def test_weights_without_a_finite_sum_are_relative_too() -> None:
    parts: Any = [Numbers("a", 10), Numbers("b", 10)]
    assert len(Mixture(parts, [1.2e308, 1.2e308])) == 20


def test_a_job_trains_on_weighted_sources(make_small: Callable[..., Job], corpus: Path, tmp_path: Path) -> None:
    """And goes on with them alone: other weights are other data."""
    (tmp_path / "more.txt").write_text("a few more words, and then some others\n" * 60)
    data = {**make_small().data.model_dump(mode="json"), "train": [str(corpus), str(tmp_path / "more.txt")]}
    told = run_job(make_small(data={**data, "weights": [1, 3]}), quiet=True)
    assert told.end is not None
    with pytest.raises(UserError, match="was made with data"):
        run_job(make_small(data={**data, "weights": [3, 1]}, steps=3), resume=True, quiet=True)
    assert run_job(make_small(data={**data, "weights": [1, 3]}, steps=3), resume=True, quiet=True).step == 3
    with pytest.raises(ValueError, match=r"data\.weights has 1 numbers for 2"):
        make_small(data={**data, "weights": [1]})
