"""The error a user can act on.

Raise it with one sentence that names the bad value, where it came from and the fix. The command line
prints that sentence and exits with code 2; a traceback is reserved for our own mistakes.
"""

from tightfit.printable import sentence


class UserError(ValueError):
    """A mistake in what the user gave us, worded for the user; control characters of values in it are spelled out."""

    def __str__(self) -> str:
        return sentence(super().__str__())
