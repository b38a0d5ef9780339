"""The text of an answer as its tokens come: whole characters only, and never past a stop string.

A character may take several tokens, and a token's text may depend on the one before it (a leading space), so a few
tokens are decoded together and what was shown before is taken off the front. A stop string may begin in one token and
end in another: text that could become one is held back until it is clear.
"""

from collections.abc import Sequence

from tightfit.models.text.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"
LONGEST_CHARACTER_TOKENS = 8
"""Tokens after which bytes that are no character are shown as they are."""


class TextStream:
    """Turns one answer's tokens into text that may be shown; `stopped` once a stop string has appeared."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens: list[int] = []
        self._from, self._shown = 0, 0  # tokens from here are decoded together; those below `_shown` have been
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that may be shown now that `token` has come."""
        self._tokens.append(token)
        return self._released(self._decoded(final=False))

    def finish(self) -> str:
        """The text that was held back, now that no token follows."""
        if self.stopped:
            return ""
        shown = self._released(self._decoded(final=True))
        held, self._held = self._held, ""
        return shown + ("" if self.stopped else held)

    def _decoded(self, *, final: bool) -> str:
        """Text of the tokens that have not been shown, once their last character is whole."""
        before = self._decode(self._tokens[self._from : self._shown])
        after = self._decode(self._tokens[self._from :])
        waiting = len(self._tokens) - self._shown
        if not final and after.endswith(INCOMPLETE) and waiting < LONGEST_CHARACTER_TOKENS:
            return ""
        self._from, self._shown = self._shown, len(self._tokens)
        return after[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special=True) if tokens else ""

    def _released(self, new: str) -> str:
        """The text held back and then `new`, up to a stop string or the beginning of one, which is held back."""
        if self.stopped:
            return ""
        text = self._held + new
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
