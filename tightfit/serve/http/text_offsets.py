"""`text_offset` of a completion's log probabilities: where each token begins in the text."""

import codecs
from collections.abc import Iterable

from tightfit.models.text.tokenizer import Tokenizer


class TextOffsets:
    """Counts characters from `start` on, as tokens come; a token that continues a character has the character's offset.

    Counted are the bytes of tokens: where a tokenizer drops a space before the first token, offsets are one too high.
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0) -> None:
        self._tokenizer, self._at = tokenizer, start
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: Iterable[int]) -> list[int]:
        """Where each of the next `tokens` begins; special tokens have no text."""
        found = []
        for token in tokens:
            found.append(self._at)
            if token not in self._tokenizer.special_tokens:
                self._at += len(self._bytes.decode(self._tokenizer.token_bytes(token)))
        return found
