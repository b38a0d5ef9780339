"""Untrusted text made safe to show: without control characters, so that no file, name or model steers a terminal.

An escape sequence can hide lines, change the window's title or write what looks like a prompt. Whatever a person reads
of file contents, file names, model output or errors therefore passes through here: control characters (C0 but line
break and tab, DEL, C1) and lone surrogates, which no terminal can print, become their Python spelling, such as `\\x1b`.
"""

from collections.abc import Callable

Say = Callable[[str], None]
"""Shows the user a line of text."""
_CONTROLS = [*range(0x20), 0x7F, *range(0x80, 0xA0)]
_SPELLED = {code: f"\\x{code:02x}" for code in _CONTROLS if chr(code) not in "\n\t"}
_IN_JSON = {code: f"\\u{code:04x}" for code in (0x7F, *range(0x80, 0xA0))}
LONGEST_SENTENCE = 2_000


def printable(text: str) -> str:
    """`text` with its control characters spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").translate(_SPELLED)


def printable_json(text: str) -> str:
    """A JSON document in which DEL and C1 are escaped as well (`json.dumps` escapes C0); it means the same."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").translate(_IN_JSON)


def sentence(text: str) -> str:
    """`printable` text on one line; of more than LONGEST_SENTENCE characters only the beginning and the end."""
    text = text.replace("\n", "\\n").replace("\t", "\\t")
    if len(text) > LONGEST_SENTENCE:
        text = f"{text[: LONGEST_SENTENCE - 501]}…{text[-500:]}"
    return printable(text)
