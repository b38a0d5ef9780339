"""Distributions by hand, penalties by hand, draws by their frequencies."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.decoding.top_k_top_p import FIRST_LOOK
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.sampling.acceptance import accepted
from tightfit.serve.sampling.random_numbers import uniform
from tightfit.serve.sampling.sampler import adjust, draw, probabilities
from tightfit.serve.schedule.sequence import Sequence

ORDER = torch.tensor([2, 0, 3, 1])
LOGITS = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[ORDER] + 5
# Surprises are 0.92, 1.20, 1.61, 2.30 and the entropy is 1.28: the second token is the most typical, then the third.
CASES: list[tuple[dict[str, Any], list[float]]] = [
    ({}, [0.4, 0.3, 0.2, 0.1]),
    ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    ({"temperature": 0}, [1.0, 0, 0, 0]),
    ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
    ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
    ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),
    ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
    ({"top_p": 0.01}, [1.0, 0, 0, 0]),
    ({"top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),
    ({"min_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
    ({"top_k": 3, "min_p": 0.3}, [4 / 9, 3 / 9, 2 / 9, 0]),
    ({"typical_p": 0.25}, [0, 1.0, 0, 0]),
    ({"typical_p": 0.45}, [0, 3 / 5, 2 / 5, 0]),
]


def test_distributions_are_exact_all_in_one_batch() -> None:
    settings = [Sampling(seed=0, **given) for given, _ in CASES]
    made = probabilities(LOGITS.repeat(len(CASES), 1), settings)
    for (given, wanted), row in zip(CASES, made, strict=True):
        torch.testing.assert_close(row, torch.tensor(wanted)[ORDER], msg=str(given))
    for (_, wanted), setting in zip(CASES, settings, strict=True):
        torch.testing.assert_close(probabilities(LOGITS[None], [setting])[0], torch.tensor(wanted)[ORDER])


def test_a_flat_distribution_is_cut_beyond_the_first_look() -> None:
    """Where the likeliest few do not reach p, everything is sorted after all."""
    width = 4 * FIRST_LOOK
    logits = torch.zeros(1, width)
    assert (probabilities(logits, [Sampling(top_p=0.75)]) > 0).sum() == width * 3 // 4
    assert (probabilities(logits, [Sampling(top_k=5)]) > 0).sum() == 5
    assert (probabilities(logits, [Sampling(top_k=width - 1, top_p=0.5)]) > 0).sum() == width // 2
    peaked = torch.cat([torch.full((1, 3), 20.0), logits[:, 3:]], dim=1)
    assert (probabilities(peaked, [Sampling(top_p=0.9)]) > 0).sum() == 3


def test_a_large_k_and_a_share_of_it_are_the_same_beside_rows_without_a_k() -> None:
    """The share is of the sum of all k, also where the likeliest few would do for the other rows."""
    torch.manual_seed(0)
    flat = 0.8 * torch.randn(8 * FIRST_LOOK)
    peaked = 4.0 * torch.randn(8 * FIRST_LOOK)
    own, other = Sampling(top_k=3 * FIRST_LOOK, top_p=0.37), Sampling(top_p=0.5)
    largest = flat.softmax(-1).sort(descending=True).values[: own.top_k]
    kept = int((largest.cumsum(0) - largest < own.top_p * largest.sum()).sum())
    assert largest[:FIRST_LOOK].sum() > own.top_p
    for logits, settings in ((flat[None], [own]), (torch.stack([flat, peaked]), [own, other])):
        assert (probabilities(logits, settings)[0] > 0).sum() == kept


def numbers_for(draws: int) -> Tensor:
    return torch.tensor([uniform(7, 0, position) for position in range(draws)], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_draws_have_the_frequencies_of_the_distribution(dtype: torch.dtype) -> None:
    chances = torch.tensor([0.5, 0.0, 0.2, 0.3, 0.0], dtype=dtype)
    draws = 20_000
    numbers = numbers_for(draws)
    seen = torch.bincount(draw(chances.expand(draws, -1), numbers), minlength=5) / draws
    assert not seen[chances == 0].any()
    assert ((seen - chances).abs() <= 5 * (chances * (1 - chances) / draws).sqrt()).all()


def test_draws_from_a_large_vocabulary() -> None:
    """Tokens in the order of their chances, in twenty parts; those that a grammar forbids are never drawn."""
    torch.manual_seed(0)
    width, draws = 128_256, 2000
    logits = (4 * torch.randn(1, width)).to(torch.bfloat16)
    forbidden = torch.rand(width) < 0.4
    chances = probabilities(logits.masked_fill(forbidden, -torch.inf), [Sampling(temperature=1.5)])
    tokens = draw(chances.expand(draws, -1), numbers_for(draws))
    assert not forbidden[tokens].any()
    ordered, order = chances[0].double().sort()
    part = torch.empty(width, dtype=torch.int64)
    part[order] = (20 * ordered.cumsum(0)).long().clamp(max=19)
    shares = torch.zeros(20, dtype=torch.float64).index_add_(0, part, chances[0].double())
    seen = torch.bincount(part[tokens], minlength=20) / draws
    assert ((seen - shares).abs() <= 5 * (shares * (1 - shares) / draws).sqrt()).all()


def test_every_token_of_a_long_tail_can_be_drawn() -> None:
    """In the middle of its share of the sum, however little that is beside the sum."""
    width = 128_256
    chances = torch.full((width,), 1e-9)
    chances[1::2] = 0.0
    chances[3] = 1.0
    exact = chances.double()
    middles = (exact.cumsum(0) - exact / 2) / exact.sum()
    possible = torch.cat([torch.arange(0, width, 1024), torch.tensor([2, 3, 4, width - 2])])
    assert draw(chances.expand(len(possible), -1), middles[possible]).tolist() == possible.tolist()


@pytest.mark.parametrize("draft", [None, 0.0], ids=["certain", "drawn"])
def test_what_a_rejected_guess_leaves_is_drawn_however_little_it_is(
    draft: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.serve.sampling.acceptance.uniform_of", lambda *given: 1 - 2.0**-53)
    target = torch.tensor([[0.0, 1 - 2.0**-24, 1e-20, 0.0]]).repeat(2, 1)
    guessed_from = None if draft is None else torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    [[token]] = accepted(target, [(Sequence([0], Sampling(seed=0)), (1,), guessed_from)])
    assert token == 2


def test_the_ends_of_the_unit_interval_draw_possible_tokens() -> None:
    chances = torch.tensor([[0.0, 0.3, 0.7, 0.0]]).repeat(2, 1)
    assert draw(chances, torch.tensor([0.0, 1 - 2**-24])).tolist() == [1, 2]
    assert draw(chances, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 2]


def test_random_numbers_differ_by_seed_answer_position_and_purpose() -> None:
    made = {uniform(s, i, p, u) for s in range(5) for i in range(5) for p in range(40) for u in ("choose", "accept")}
    assert len(made) == 5 * 5 * 40 * 2
    mean = sum(made) / len(made)
    assert abs(mean - 0.5) < 5 * math.sqrt(1 / 12 / len(made))


def test_penalties_and_bias_change_the_logits_as_written() -> None:
    sampling = Sampling(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={4: 3.0}, seed=0
    )
    sequence = Sequence([0, 1], sampling)
    for token in (2, 2, 3):
        sequence.append(token)
    logits = torch.tensor([4.0, -4.0, 4.0, -4.0, 0.0, 1.0]).repeat(4, 1)
    allowed = torch.tensor([False, True, False, False, False, False])
    formed = Sequence([0], Sampling(seed=0))
    other = Sequence([3], Sampling(seed=0, repetition_penalty=4.0, logit_bias={4: 1.5}))
    adjust(logits, [(0, sequence, None), (2, formed, allowed), (3, other, None)])
    assert logits[0].tolist() == [2.0, -8.0, 2.0 - 0.5 - 0.5, -8.0 - 0.5 - 0.25, 3.0, 1.0]
    assert logits[1].tolist() == [4.0, -4.0, 4.0, -4.0, 0.0, 1.0]
    assert logits[2].isfinite().tolist() == allowed.tolist()
    assert logits[3].tolist() == [4.0, -4.0, 4.0, -16.0, 1.5, 1.0]


@pytest.mark.parametrize(
    "setting",
    [
        {"max_tokens": 0},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"min_p": 1.5},
        {"typical_p": 0.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"seed": -1},
        {"stop": ("",)},
        {"logprobs": 21},
        {"repetition_penalty": 1e-300},
        {"logit_bias": {3: float("nan")}},
        {"logit_bias": {3: 1e308}},
    ],
)
def test_bad_settings_are_refused(setting: dict) -> None:
    with pytest.raises(UserError, match=f"{next(iter(setting))}.* is "):
        Sampling(**setting)
