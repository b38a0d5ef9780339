"""Running: an answer under way, and how its next tokens extend it or end it."""

from dataclasses import dataclass, field

from tightfit.serve.requests.grammar import Matcher
from tightfit.serve.requests.request import Finish, Request
from tightfit.serve.requests.text_stream import TextStream
from tightfit.serve.schedule.sequence import Sequence


@dataclass(eq=False)
class Running:
    """What the engine keeps of one answer: its sequence, the decoder of its text, and its state in the grammar."""

    request: Request
    sequence: Sequence
    text: TextStream | None
    matcher: Matcher | None
    siblings: list["Running"] = field(default_factory=list)
    """Other answers to the request, which begin once the prompt is in the cache."""

    def extend(self, tokens: list[int]) -> tuple[list[int], str, Finish | None]:
        """Append `tokens` until one ends the answer; (the tokens appended, their text, why it is over or None)."""
        sequence, text, taken = self.sequence, "", []
        if self.text is None and self.matcher is None and len(tokens) == 1:  # the fast path: neither text nor grammar
            sequence.append(tokens[0])
            return tokens, "", self._ends(tokens[0])
        for token in tokens:
            sequence.append(token)
            taken.append(token)
            finish = self._ends(token)
            if self.text is not None and token not in sequence.sampling.stop_ids:
                text += self.text.push(token)
                if self.text.stopped:
                    finish = "stop"
            if finish is not None:
                rest = self.text.finish() if self.text is not None else ""
                stopped = self.text is not None and self.text.stopped  # by a stop string, perhaps only in the rest
                return taken, text + rest, "stop" if stopped else finish
        return taken, text, None

    def _ends(self, token: int) -> Finish | None:
        """Why the answer is over after `token`, its last; None where it goes on."""
        sequence, is_last = self.sequence, token in self.sequence.sampling.stop_ids
        if self.matcher is not None:
            if not is_last:
                self.matcher.advance(token)
            if self.matcher.has_failed:
                return "length"  # incomplete, as an answer that was cut off
            is_last = is_last or self.matcher.is_over
        if is_last:
            return "stop"
        return "length" if len(sequence.tokens) - len(sequence.prompt) >= sequence.sampling.max_tokens else None
