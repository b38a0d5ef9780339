"""Where the tokens of a completion begin in its text, which its log probabilities say beside them."""

import codecs
from collections.abc import Iterable

from tightfit.models.tokenizer import Tokenizer


class TextOffsets:
    """Counts characters from `start` on, as tokens come: one that only goes on with a character begins where that ends.

    Tokens are taken for the bytes they are: a tokenizer that drops a space before the first is off by one.
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0) -> None:
        self._tokenizer, self._at = tokenizer, start
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: Iterable[int]) -> list[int]:
        """Where each of the next `tokens` begins; those that say how a text is meant are not in it."""
        found = []
        for token in tokens:
            found.append(self._at)
            if token not in self._tokenizer.special_tokens:
                self._at += len(self._bytes.decode(self._tokenizer.token_bytes(token)))
        return found
