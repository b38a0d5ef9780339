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
            if self.text is not None and not (finish == "stop" and token in sequence.sampling.stop_ids):
                text += self.text.push(token)
                if self.text.stopped:
                    finish = "stop"
            if finish is not None:
                return taken, text + (self.text.finish() if self.text is not None else ""), finish
        return taken, text, None

    def _ends(self, token: int) -> Finish | None:
        """Why the answer is over after `token`, its last; None where it goes on."""
        sequence = self.sequence
        if token in sequence.sampling.stop_ids:
            return "stop"
        if self.matcher is not None:
            self.matcher.advance(token)
            if self.matcher.is_over:
                return "stop"
        return "length" if len(sequence.tokens) - len(sequence.prompt) >= sequence.sampling.max_tokens else None
