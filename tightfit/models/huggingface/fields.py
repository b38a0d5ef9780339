"""Typed, validated reading of an untrusted config.json.

Every accessor returns a value of the asked type or raises a UserError that names the field, the value, the file and
the fix. A missing field falls back to the family's default; a field that is present and null is None, which the
`maybe_` accessors allow. Numbers are checked for NaN, infinity and absurd size here and nowhere else.
"""

import reprlib
from collections.abc import Mapping
from typing import Any

from tightfit.errors import UserError

LARGEST_NUMBER = 1e15


class Fields:
    """A JSON object with a name: `source` for messages, `inside` where it sits within another object."""

    def __init__(
        self, values: Mapping[str, Any], source: str, defaults: Mapping[str, Any] | None = None, inside: str = ""
    ) -> None:
        self.values, self.source, self.defaults, self.inside = values, source, defaults or {}, inside

    def get(self, *names: str) -> tuple[str, Any]:
        """The first of `names` that is there, else the default of the first, with the name it was found under."""
        for name in names:
            if name in self.values:
                return name, self.values[name]
        return names[0], self.defaults.get(names[0])

    def bad(self, name: str, value: Any, fix: str) -> UserError:
        """The error to raise about field `name`."""
        path = f"{self.inside}.{name}" if self.inside else name
        stated = "missing" if value is None else reprlib.repr(value)
        return UserError(f"{path} in {self.source} is {stated}; {fix}")

    def maybe_whole(self, *names: str, most: int, least: int = 1) -> int | None:
        """A whole number from `least` to `most`, or None."""
        name, value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.bad(name, value, f"it must be a whole number from {least:,} to {most:,}")
        return value

    def whole(self, *names: str, most: int, least: int = 1) -> int:
        """A whole number from `least` to `most`."""
        value = self.maybe_whole(*names, most=most, least=least)
        if value is None:
            raise self.bad(names[0], None, f"it must be a whole number from {least:,} to {most:,}")
        return value

    def maybe_number(self, *names: str, above: float = 0.0, or_equal: bool = False) -> float | None:
        """A finite number above `above` (or equal to it), or None."""
        name, value = self.get(*names)
        return None if value is None else self._number(name, value, above, or_equal)

    def number(self, *names: str, above: float = 0.0, or_equal: bool = False) -> float:
        """A finite number above `above` (or equal to it)."""
        name, value = self.get(*names)
        return self._number(name, value, above, or_equal)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` positive numbers."""
        value = self.get(name)[1]
        if not isinstance(value, list) or len(value) != count:
            raise self.bad(name, value, f"it must be a list of {count} numbers, one per rotated pair")
        return tuple(self._number(f"{name}[{i}]", item, 0.0, False) for i, item in enumerate(value))

    def flag(self, *names: str) -> bool:
        """True or false; null counts as false."""
        name, value = self.get(*names)
        if value is not None and not isinstance(value, bool):
            raise self.bad(name, value, "it must be true or false")
        return bool(value)

    def word(self, *names: str) -> str:
        """A string."""
        name, value = self.get(*names)
        if not isinstance(value, str):
            raise self.bad(name, value, "it must be a string")
        return value

    def items(self, name: str) -> list[Any] | None:
        """A list, or None."""
        value = self.get(name)[1]
        if value is not None and not isinstance(value, list):
            raise self.bad(name, value, "it must be a list")
        return value

    def inner(self, name: str) -> "Fields | None":
        """The object under `name`, or None where there is none or an empty one."""
        value = self.get(name)[1]
        if value is not None and not isinstance(value, Mapping):
            raise self.bad(name, value, "it must be an object with named fields")
        return Fields(value, self.source, inside=f"{self.inside}.{name}" if self.inside else name) if value else None

    def _number(self, name: str, value: Any, above: float, or_equal: bool) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not (above < value < LARGEST_NUMBER or (or_equal and value == above)):  # NaN fails this as well
            bound = f"of at least {above:g}" if or_equal else f"above {above:g}"
            raise self.bad(name, value, f"it must be a number {bound} and below {LARGEST_NUMBER:g}")
        return float(value)
