"""Patterns of files: what `re` says they mean, in bounded time whatever they are."""

import random
import re

import pytest

from tests.speed import within_turns
from tightfit.bounded_patterns import PatternError, begins_with

NAMES = ["", "a", "ab", "aab_1", "model.layers.11.self_attn.q_proj", "model.layers.1.mlp.gate_proj", "lm_head", "b\n"]
WRITTEN_BY_OTHERS = [
    r".*self_attn\.(q|k|v|o)_proj$",
    r"model\.layers\.[0-9]+\.mlp\..*",
    r"^(?!.*(lm_head|vision)).*_proj",
    r".*(?<!gate)_proj",
    r"(?:model\.)?layers\.(1|11)\..*",
    r".*layers\.\d{1,2}\.\w+\.\S*?[^qk]_proj\Z",
    r"\bmodel\b.*|lm_head",
]


def pieces(chance: random.Random, depth: int = 3) -> str:
    """A random pattern."""
    if depth == 0:
        return chance.choice(["a", "b", "_", r"\.", ".", "[ab]", "[^a]", "[a-m]", r"\d", r"\w", r"\W", "^", "$", r"\b"])
    one, other = pieces(chance, depth - 1), pieces(chance, depth - 1)
    shapes = ["{}{}", "{}|{}", "({})*{}", "({})+?{}", "({})?{}", "({}){{1,3}}{}", "({}){{2}}{}", "(?={}){}", "(?!{}){}"]
    return chance.choice(shapes).format(one, other)


def test_patterns_mean_what_re_says() -> None:
    for pattern in WRITTEN_BY_OTHERS:
        for name in NAMES:
            assert begins_with(pattern, name) == (re.match(pattern, name) is not None), (pattern, name)


def test_random_patterns_mean_what_re_says() -> None:
    """On short texts, which `re` can take."""
    chance = random.Random(0)
    for pattern in [pieces(chance) for _ in range(600)]:
        for name in ("", "a", "ab", "ba_", "a.1b", "bb\n"):
            assert begins_with(pattern, name) == (re.match(pattern, name) is not None), (pattern, name)


def answer(pattern: str, text: str) -> bool | str:
    """Whether it matches, or the word by which a refusal is known."""
    try:
        return begins_with(pattern, text)
    except PatternError as error:
        return next(word for word in ("steps", "inside") if word in str(error))


NAME = "model.layers.0.self_attn." + "a" * 60


@pytest.mark.parametrize(
    "pattern",
    [
        "(.+)+$x",
        "(.*)*x",
        "(.|.|.)*x",
        ".*" * 300 + "x",
        "(.*.*.*)*" * 50 + "x",
        "((((.{1,9}){1,9}){1,9}){1,9}){1,9}x",
        "(?=(.+)+x)" * 40,
        "(?=.*z)|" * 40 + "x",
        "(?:.?){9999}" * 50 + "x",
        "(?:(?=.*x)?.)*" * 20 + "x",
    ],
)
def test_no_pattern_takes_long(pattern: str) -> None:
    """It is answered or refused; four of these take `re` longer than a test may."""
    with within_turns(20):
        assert answer(pattern, NAME) in (False, "steps")


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(", "no regular expression"),
        ("a{99999999999999999999}", "no regular expression"),
        ("a" * 1001, "longer than 1000"),
        (r"(a)\1", "references"),
        ("(?>a)", "atomic"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
    ],
)
def test_what_is_not_read_is_said(pattern: str, said: str) -> None:
    with pytest.raises(PatternError, match=said):
        begins_with(pattern, "aaa")


def test_deep_nesting_is_answered_or_refused() -> None:
    """How deep is too deep depends on who calls."""
    assert answer("(" * 400 + ")" * 400, "aaa") in (True, "inside")
