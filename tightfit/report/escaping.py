"""Untrusted text inside rich markup: its brackets are not markup, and its control characters are made visible."""

from rich import markup

from tightfit.printable import printable


def escape(text: str) -> str:
    """`text` escaped for use in rich markup."""
    return markup.escape(printable(text))
