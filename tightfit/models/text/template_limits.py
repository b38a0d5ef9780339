"""A budget for the rendering of a template: fuel for everything it does, and a time limit.

A chat template is a program of the model's author. Jinja's sandbox keeps it from reaching the machine, but not from
looping for hours or making a text of gigabytes. Here every piece of work is paid for from one account per rendering:
a turn of a loop, a call, and every value that is made by its size. Overdrawing the account is an error, so memory and
time are bounded whatever the template does; a real one uses a few thousandths of it, and the accounting costs some 10 %
of the time a rendering takes.
"""

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

FUEL = 50_000_000
"""Units of work of one rendering (characters made, turns of loops at TURN each), beside those per input character."""
FUEL_PER_CHARACTER = 64
TURN = 50
SECONDS = 10.0
LONGEST_INTEGER_BITS = 4096


class TemplateTooCostlyError(Exception):
    """The template wants more than a rendering may take."""


class Account:
    """What is left of a rendering's fuel and time."""

    def __init__(self, input_characters: int) -> None:
        self.left = FUEL + FUEL_PER_CHARACTER * input_characters
        self.deadline, self.payments = time.thread_time() + SECONDS, 0

    def spend(self, units: int) -> None:
        """Pay for some work before it is done."""
        self.left -= units
        self.payments += 1
        if self.left < 0:
            raise TemplateTooCostlyError("it loops too often or makes too much text")
        if self.payments % 64 == 0 and time.thread_time() > self.deadline:  # a busy machine is not the template's fault
            raise TemplateTooCostlyError(f"it takes longer than {SECONDS:.0f} s")


_account: ContextVar[Account | None] = ContextVar("account", default=None)


@contextmanager
def limited(input_characters: int) -> Iterator[Account]:
    """The account that everything rendered inside pays from; nested uses share the outermost one."""
    if (outer := _account.get()) is not None:
        yield outer
        return
    account = Account(input_characters)
    token = _account.set(account)
    try:
        yield account
    finally:
        _account.reset(token)


def spend(units: int) -> None:
    """Pay from the account of the rendering that is going on; constants folded at compile time have one as well."""
    account = _account.get()
    assert account is not None, "nothing is being rendered"
    account.spend(units)


def counted(values: Iterable[Any], price: int) -> Iterator[Any]:
    """`values`, each paid for as it is taken."""
    for value in values:
        spend(price)
        yield value


def sized(value: Any) -> int:
    """How much a value holds, one level deep: what is inside was paid for when it was made."""
    if isinstance(value, str | bytes | list | tuple | dict | set | frozenset):
        return len(value)
    if isinstance(value, int) and value.bit_length() > LONGEST_INTEGER_BITS:
        raise TemplateTooCostlyError("it computes with numbers that are too long")
    return 1


def spend_deep(value: Any) -> None:
    """Pay for all that a walk through `value` meets, as often as it meets it: a list of the same list twice, and that
    twice again, is short to write down and endless to print, compare or hash."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            spend(TURN + len(each))
            waiting += each.keys()
            waiting += each.values()
        elif isinstance(each, list | tuple | set | frozenset):
            spend(TURN + len(each))
            waiting += each
        elif isinstance(each, str):
            spend(len(each))


def paid(value: Any) -> Any:
    """`value`, paid for."""
    spend(sized(value))
    return value


def refuse_growth(name: str, subject: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Pay beforehand for calls that make much of little: methods and filters with widths, repetitions, replacements."""
    given = [*arguments, *options.values()]
    size = sized(subject)
    if name in DEEP:
        spend_deep([subject, *given])
    if name in WIDE or (name in FORMATTING and isinstance(subject, str) and NESTED_WIDTH.search(subject)):
        widths = [min(abs(value), 2**62) for value in given if isinstance(value, int | float)]
        spend(int(max(widths, default=1)) * (size if name in LINEWISE else 1))
    texts = [value for value in given if isinstance(value, str)]
    if name == "replace" and isinstance(subject, str) and len(texts) > 1:
        spend(len(subject) + (subject.count(texts[0]) + 1) * len(texts[1]))
    elif name in JOINING:
        joined = subject if isinstance(subject, str) else (texts[0] if texts else "")
        parts = next((value for value in (subject, *given) if isinstance(value, list | tuple | range)), ())
        spend(sum(sized(part) for part in parts) + len(parts) * len(joined))
    elif name in FORMATTING and isinstance(subject, str):
        nested = texts if NESTED_WIDTH.search(subject) else []
        spend(size + sum(map(len, texts)) + max(_largest_number(text) for text in [subject, *nested]))
    else:
        spend(size + sum(map(len, texts)))


WIDE = frozenset(
    {"center", "ljust", "rjust", "zfill", "indent", "expandtabs", "wordwrap", "tojson", "batch", "slice", "round"}
    | {"to_bytes", "truncate"}
)
"""Methods and filters whose result can be as long as a number among their arguments says."""
NESTED_WIDTH = re.compile(r"\*|\{[^{}]*\{")
"""A format whose widths are arguments."""
LINEWISE = frozenset({"indent", "expandtabs", "wordwrap", "tojson"})
"""Those that add this length to every line, tab or value."""
JOINING = frozenset({"join"})
FORMATTING = frozenset({"format", "format_map", "__mod__"})
DEEP = FORMATTING | {"tojson", "string", "join", "sort", "unique", "groupby", "min", "max", "sum", "dictsort", "escape"}
"""Methods and filters that walk through all of a nested value."""


def _largest_number(text: str) -> int:
    """The largest number in a format, which may be a width."""
    return max((int(number[:18]) for number in re.findall(r"[0-9]{4,}", text)), default=0)
