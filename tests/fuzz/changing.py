"""Ways to make something wrong of something right: bytes, JSON values, texts and numbers that programs trip over."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

NUMBERS = (
    0,
    -1,
    1,
    2,
    255,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    10**400,
    -(2**63),
    0.5,
    1e-300,
    1e300,
    1.7976931348623157e308,
    float("inf"),
    float("-inf"),
    float("nan"),
    True,
    False,
)
WORDS = (
    "",
    " ",
    "\0",
    "\x1b]0;title\x07",
    "\x1b[2J",
    "\x9b31m",
    "\u202e",
    "\ud800",
    "a" * 5000,
    "/dev/zero",
    "/dev/null",
    "../../etc/passwd",
    "/etc/passwd",
    "~nosuchuser/x",
    "~",
    "nan",
    "inf",
    "1e999",
    "0x" + "f" * 5000,
    "9" * 5000,
    "-0",
    "${HOME}",
    "$(id)",
    "`id`",
    "{{ 7*7 }}",
    "%s%n",
    "é",
    "e\u0301",
    "日本語",
    "🙂",
    "\r\n",
    "\ufeff",
    "null",
    "true",
    "__class__",
    "__import__('os').system('id')",
    "!!python/object/apply:os.system ['id']",
    "'; --",
    "<|im_end|>",
)


def number(chance: random.Random) -> Any:
    """A number at the edge of something."""
    return chance.choice(NUMBERS) if chance.random() < 0.7 else chance.randrange(-(10**6), 10**6)


def word(chance: random.Random) -> str:
    """A text that means something to somebody."""
    if chance.random() < 0.7:
        return chance.choice(WORDS)
    return "".join(chr(chance.randrange(1, 0x300)) for _ in range(chance.randrange(40)))


def value(chance: random.Random, depth: int = 0) -> Any:
    """Any JSON value, and what Python's JSON reads beyond them."""
    kind = chance.randrange(8 if depth < 3 else 5)
    if kind == 0:
        return None
    if kind <= 2:
        return number(chance)
    if kind <= 4:
        return word(chance)
    if kind == 5:
        return [value(chance, depth + 1) for _ in range(chance.choice((0, 1, 3, 200)))]
    if kind == 6:
        return nested(chance.choice((10, 500, 5000)))
    return {word(chance): value(chance, depth + 1) for _ in range(chance.randrange(4))}


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    made: Any = []
    for _ in range(depth):
        made = [made]
    return made


def changed_value(chance: random.Random, whole: Any, times: int = 1) -> Any:
    """`whole`, a JSON value, with some of what is in it replaced, removed, renamed or doubled."""
    whole = copy.deepcopy(whole)
    for _ in range(times):
        spots = list(_spots(whole))
        if not spots:
            return value(chance)
        holder, key = chance.choice(spots)
        _change(chance, holder, key)
    return whole


def _spots(node: Any, depth: int = 0) -> Any:
    if depth > 20:
        return
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
    for key in keys:
        yield node, key
        yield from _spots(node[key], depth + 1)


def _change(chance: random.Random, holder: Any, key: Any) -> None:
    kind = chance.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[word(chance)] = holder.pop(key)
    elif kind == 2 and isinstance(holder, list):
        holder += [holder[key]] * chance.choice((1, 50))
    elif kind == 3 and isinstance(holder[key], int | float):
        holder[key] = number(chance)
    else:
        holder[key] = value(chance)


def dumped(chance: random.Random, whole: Any) -> bytes:
    """As a file of JSON, now and then with its bytes changed as well."""
    try:
        text = json.dumps(whole, ensure_ascii=chance.random() < 0.5)
    except (RecursionError, ValueError):
        text = "[" * 100_000
    content = text.encode("utf-8", "surrogatepass")
    return changed_bytes(chance, content) if chance.random() < 0.25 else content


def changed_bytes(chance: random.Random, content: bytes) -> bytes:
    """Some bytes flipped, lost, doubled or put elsewhere."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        CHANGES[chance.randrange(len(CHANGES))](chance, data)
    return bytes(data)


def _flip(chance: random.Random, data: bytearray) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _set(chance: random.Random, data: bytearray) -> None:
    if data:
        at = chance.randrange(len(data))
        data[at : at + 8] = chance.choice((b"\0" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f", (2**40).to_bytes(8, "little")))


def _cut(chance: random.Random, data: bytearray) -> None:
    if data:
        del data[chance.randrange(len(data)) :]


def _lose(chance: random.Random, data: bytearray) -> None:
    if data:
        at = chance.randrange(len(data))
        del data[at : at + chance.randrange(1, 64)]


def _double(chance: random.Random, data: bytearray) -> None:
    if data:
        at = chance.randrange(len(data))
        data[at:at] = data[at : at + chance.randrange(1, 256)]


def _insert(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = word(chance).encode("utf-8", "surrogatepass")


CHANGES: tuple[Callable[[random.Random, bytearray], None], ...] = (_flip, _flip, _set, _cut, _lose, _double, _insert)
