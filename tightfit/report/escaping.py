"""Foreign text inside rich markup: neither its brackets nor its control characters mean anything."""

from rich import markup

from tightfit.printable import printable


def escape(text: str) -> str:
    """`text` as it may stand in markup that is printed."""
    return markup.escape(printable(text))
