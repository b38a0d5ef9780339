"""Bodies that would keep Python's JSON parser busy for seconds, and all other requests waiting: found by their bytes.

What takes time is not a body's size but its number of values: 8 MiB of `[],` are 2.8 million lists, which the parser
makes and the garbage collector walks over with the interpreter's lock held. Brackets, braces and commas outside of
texts say how many there are. Counting takes milliseconds where even those inside of texts are few enough, and
a third of a second at worst.
"""

import json

MOST_LISTS = 2**16
"""Lists and objects of a body; a conversation has one a message, tools one a field of their schemas."""
MOST_VALUES = 2**19
"""Items and fields of a body, tokens of prompts among them."""
_QUOTES_AND_BORDERS = b'"[{,'
_ALL_OTHERS = bytes(set(range(256)) - set(_QUOTES_AND_BORDERS))


def crowded(body: bytes) -> str | None:
    """Why `body` is not parsed, in one sentence; None where it may be."""
    if not json.detect_encoding(body).startswith("utf-8"):
        return "the body is not in UTF-8"
    if _few(body) or _few_outside_texts(body):
        return None
    return f"the body has more than {MOST_LISTS} lists and objects or {MOST_VALUES} values; send less at a time"


def _few(text: bytes) -> bool:
    lists = text.count(b"[") + text.count(b"{")
    return lists <= MOST_LISTS and lists + text.count(b",") <= MOST_VALUES


def _few_outside_texts(body: bytes) -> bool:
    """Whether there are few brackets, braces and commas outside of texts, and few texts."""
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if unescaped.count(b'"') > 4 * MOST_VALUES:  # a field has two texts at most, its name and its value
        return False
    borders = unescaped.translate(None, _ALL_OTHERS)
    borders = borders.replace(b'""', b"")  # what follows stays inside or outside, and pieces get fewer
    return _few(b"".join(borders.split(b'"')[::2]))
