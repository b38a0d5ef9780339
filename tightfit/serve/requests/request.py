"""A request, and the outputs that come back for it step by step."""

from dataclasses import dataclass, field
from typing import Literal

from tightfit.serve.requests.sampling import Sampling

MOST_ANSWERS = 128
"""To one prompt."""
Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """Continue `prompt` in `count` ways. Lower `priority` goes first."""

    id: str
    prompt: list[int]
    sampling: Sampling
    count: int = 1
    priority: int = 0
    adapter: str | None = None
    """The LoRA adapter to answer with; None is the model itself."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its log probability before any setting changes the logits, and the likeliest tokens at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Output:
    """What one step added to one answer."""

    request: str
    index: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    cached: int = 0
    """Prompt tokens that were found in the prefix cache; reported with the first token."""


@dataclass
class Answer:
    """All outputs of one answer together."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    cached: int = 0

    def add(self, output: Output) -> None:
        """Append the next output."""
        self.tokens += output.tokens
        if output.text:
            self.text += output.text
        if output.logprobs:
            self.logprobs += output.logprobs
        self.finish = output.finish
        self.cached += output.cached
