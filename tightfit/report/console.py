"""The console that tables and sentences are printed to."""

import os

from rich.console import Console

UNWRAPPED = 10_000
"""Columns where nobody looks at a screen: more than any line has."""


def output_console() -> Console:
    """Standard output: as wide as the terminal, or as COLUMNS says; lines in a pipe or a file are whole, for grep."""
    found = Console(highlight=False)
    return (
        found
        if found.is_terminal or os.environ.get("COLUMNS", "").isdigit()
        else Console(highlight=False, width=UNWRAPPED)
    )
