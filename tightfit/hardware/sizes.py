"""Parsing sizes and counts: `512GB`, `64 GiB`, `64G`, `4M` tokens. Letters alone are decimal: 1G is 1GB."""

import re
from decimal import Decimal

from tightfit.errors import UserError

_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
}
LARGEST = 1e24
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def parse_bytes(text: str, what: str) -> int:
    """`512GB` as bytes; `what` names it in the error."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    if match is None or match[2].lower() not in _BYTES:
        raise UserError(f"{what} is {text!r}; write a size with its unit, such as 512GB or 480GiB")
    return int(_bounded(float(match[1]) * _BYTES[match[2].lower()], text, what))


def parse_count(text: str, what: str) -> int:
    """`4M` as a number; `what` names it in the error."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]?)\s*", text.replace(",", "").replace("_", ""))
    if match is None or match[2].lower() not in _COUNTS:
        raise UserError(f"{what} is {text!r}; write a number such as 4194304, 4M or 15T")
    count = Decimal(match[1]) * _COUNTS[match[2].lower()]
    _bounded(float(count), text, what)
    if count % 1:
        raise UserError(f"{what} is {text[:40]!r}; write a whole number")
    return int(count)


def _bounded(value: float, text: str, what: str) -> float:
    if value > LARGEST:
        raise UserError(f"{what} is {text[:40]!r}; there is nothing of that size")
    return value
