"""Whether guessing pays is timed when an engine starts, and told where it does not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.covering import sampled
from tests.serve.test_engine import CONFIG, PROMPT
from tightfit.models.decoder import Decoder
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.speculation import break_even
from tightfit.serve.speculation.break_even import ENOUGH, hint

GREEDY = Request(id="a", prompt=PROMPT, sampling=Sampling(max_tokens=20, temperature=0))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of a plain step and of one with guesses, instead of the clock's; both are made once."""
    seconds = [1.0, 3.0]
    left = list(seconds)

    def median(run: Callable[[], None]) -> float:
        run()
        return left.pop(0)

    monkeypatch.setattr(break_even, "_median_seconds", median)
    return seconds


@sampled(2)
@pytest.mark.parametrize(
    "changes", [{"speculation": "lookup"}, {"speculation": "draft"}, {"speculation": "skip", "skipped_layers": 1}]
)
def test_a_step_with_guesses_that_takes_three_has_to_keep_half_of_four(
    deeper: Decoder, smaller: Decoder, timed: list[float], changes: Any
) -> None:
    config = replace(CONFIG, speculated_tokens=4, **changes)
    engine = Engine(deeper, None, config, draft=smaller if changes["speculation"] == "draft" else None)
    assert engine.break_even == (timed[1] / timed[0] - 1) / 4 == 0.5
    assert engine.pool.free == engine.pool.size
    assert "guessing 4 tokens at a time pays from 50% kept on, for one answer at a time" in engine.describe()
    plain = Engine(deeper, None, CONFIG)
    assert plain.break_even is None
    assert "guessing" not in plain.describe()
    assert engine.generate([GREEDY])["a"][0].tokens == plain.generate([GREEDY])["a"][0].tokens
    assert engine.guessing_hint is None, "twenty tokens tell nothing"
    engine.counts.guessed, engine.counts.kept = 1000, 499
    assert engine.guessing_hint is not None


@pytest.fixture
def deeper() -> Decoder:
    """With a layer between its first and last."""
    import torch

    from tests.serve.conftest import SHAPE
    from tightfit.models.initialisation import init_weights

    torch.manual_seed(0)
    made = Decoder(replace(SHAPE, layers=3))
    init_weights(made, gain=2.0)
    return made.eval()


def test_no_room_to_try(model: Decoder) -> None:
    config = replace(CONFIG, speculation="lookup", speculated_tokens=16, max_length=12)
    engine = Engine(model, None, config)
    assert engine.break_even is None
    assert len(engine.generate([GREEDY])["a"][0].tokens) == 2


def test_hints() -> None:
    assert hint(kept=90, guessed=ENOUGH, needed=0.5) == (
        "45% of 200 guesses were kept, but they pay from 50% on: answers would come sooner without"
    )
    assert "checking them takes longer than they can save here" in str(hint(kept=200, guessed=200, needed=1.4))
    assert hint(kept=100, guessed=200, needed=0.5) is None
    assert hint(kept=0, guessed=ENOUGH - 1, needed=0.5) is None
    assert hint(kept=0, guessed=ENOUGH, needed=None) is None
    assert hint(kept=0, guessed=ENOUGH, needed=-0.1) is None, "guessing was faster even with nothing kept"
