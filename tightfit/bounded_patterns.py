"""Regular expressions from untrusted files, matched in bounded time: `(a+)+$` takes `re` ages on forty letters.

`re` tries one path after the other, of which there can be exponentially many. Here each part of the pattern maps the
set of places in the text where it may begin to the set of places where it may end, both as the bits of an integer; so
paths that meet are followed once. Repeats inside of repeats can still add up: after 10,000 such steps the pattern is
refused; patterns that name modules take some hundred. Python's own parser reads the pattern, so it means the same as in
`re`.

Limits: whether there is a match, not where its groups are; no references to groups, no atomic parts, no flags.
"""

import re
import re._constants as op  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, reduce
from operator import or_
from typing import Any

LONGEST_PATTERN = 1000
MOST_STEPS = 10_000
_LETTERS = (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN)
_KINDS: dict[Any, Callable[[str], bool]] = {
    op.CATEGORY_DIGIT: str.isdecimal,
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_WORD: lambda letter: letter.isalnum() or letter == "_",
    op.CATEGORY_NOT_DIGIT: lambda letter: not letter.isdecimal(),
    op.CATEGORY_NOT_SPACE: lambda letter: not letter.isspace(),
    op.CATEGORY_NOT_WORD: lambda letter: not (letter.isalnum() or letter == "_"),
}


class PatternError(ValueError):
    """Not a regular expression, or an unsupported one; the message is a clause that says why ("which …")."""


def begins_with(pattern: str, text: str) -> bool:
    """Whether `re.match(pattern, text)` finds something."""
    try:
        return _Search(text).after(_parsed(pattern), 1) > 0
    except RecursionError:
        raise PatternError("which has too many parts inside of each other") from None


@lru_cache(maxsize=256)
def _parsed(pattern: str) -> Any:
    if len(pattern) > LONGEST_PATTERN:
        raise PatternError(f"which is longer than {LONGEST_PATTERN} characters")
    try:
        found = parser.parse(pattern)
    except (re.error, OverflowError):
        raise PatternError("which is no regular expression") from None
    if found.state.flags & ~re.UNICODE:
        raise PatternError("which sets flags; leave them out")
    return found


class _Search:
    """A search in one text. Sets of places are bits of an integer; the lowest bit is the text's beginning."""

    def __init__(self, text: str) -> None:
        self.text, self.steps = text, 0
        self.known: dict[tuple[Any, int], int] = {}

    def after(self, parts: Any, places: int) -> int:
        """The places where `parts`, one after the other, may end if they begin at one of `places`."""
        for part in parts:
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise PatternError(f"which takes more than {MOST_STEPS} steps to look for; write it more simply")
            places = self._after(part[0], part[1], places)
        return places

    def _after(self, kind: Any, value: Any, places: int) -> int:
        if kind in _LETTERS:
            return (places & self._fitting(kind, value)) << 1
        if kind is op.AT:
            return _joined(1 << at for at in _bits(places) if self._is_at(value, at))
        if kind is op.BRANCH:
            return _joined(self.after(way, places) for way in value[1])
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, body = value
            return self._repeated(least, most, body, places)
        if kind in (op.ASSERT, op.ASSERT_NOT):
            (direction, body), wanted = value, kind is op.ASSERT
            return _joined(1 << at for at in _bits(places) if self._is_beside(direction, body, at) is wanted)
        if kind is op.SUBPATTERN and not value[1] and not value[2]:
            return self.after(value[3], places)
        told = "sets flags; leave them out" if kind is op.SUBPATTERN else "has references or atomic parts; take others"
        raise PatternError(f"which {told}")

    def _fitting(self, kind: Any, value: Any) -> int:
        """All places whose letter matches."""
        key = (kind, value if isinstance(value, int) else id(value))
        if key not in self.known:
            every = range(len(self.text))
            self.known[key] = _joined(1 << at for at in every if _is_meant(kind, value, self.text[at]))
        return self.known[key]

    def _repeated(self, least: int, most: int, parts: Any, places: int) -> int:
        for _ in range(least):
            places = self.after(parts, places)
            if not places:
                return 0
        found = fresh = places
        for _ in range(most - least):
            fresh = self.after(parts, fresh) & ~found
            found |= fresh
            if not fresh:
                break
        return found

    def _is_beside(self, direction: int, parts: Any, place: int) -> bool:
        """Whether `parts` match from `place` on (lookahead) or up to it (lookbehind, of one width, as `re` demands)."""
        if direction > 0:
            return self.after(parts, 1 << place) > 0
        width = parts.getwidth()[0]
        return width <= place and self.after(parts, 1 << place - width) >> place & 1 == 1

    def _is_at(self, where: Any, place: int) -> bool:
        if where in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            return place == 0
        if where in (op.AT_END, op.AT_END_STRING):
            return self.text[place:] in (("", "\n") if where is op.AT_END else ("",))
        is_word = [0 <= at < len(self.text) and _KINDS[op.CATEGORY_WORD](self.text[at]) for at in (place - 1, place)]
        return (is_word[0] != is_word[1]) is (where is op.AT_BOUNDARY)


def _is_meant(kind: Any, value: Any, letter: str) -> bool:
    if kind is op.ANY:
        return letter != "\n"
    if kind is not op.IN:
        return (ord(letter) == value) is (kind is op.LITERAL)
    negated = value[0][0] is op.NEGATE
    return any(_is_in(each[0], each[1], letter) for each in value[negated:]) is not negated


def _is_in(kind: Any, value: Any, letter: str) -> bool:
    if kind is op.RANGE:
        return bool(value[0] <= ord(letter) <= value[1])
    return _KINDS[value](letter) if kind is op.CATEGORY else bool(ord(letter) == value)


def _joined(places: Iterable[int]) -> int:
    return reduce(or_, places, 0)


def _bits(places: int) -> Iterator[int]:
    return (place for place in range(places.bit_length()) if places >> place & 1)
