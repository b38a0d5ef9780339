"""One answer under way: its tokens, its blocks of the cache, and how many of its positions are stored there.

`length` counts the prompt, the tokens chosen, and one more while a step is running whose token the host has not read
(`pending`): schedules only need lengths, so the next step is prepared before the tokens of the last one are known.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from tightfit.serve.requests.request import Finish
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.schedule.block_pool import ROOT, Digest, block_digest

State = Literal["new", "waiting", "running", "finished"]
"""A sequence is new until a scheduler has it."""


@dataclass(eq=False)
class Sequence:
    """A prompt and the answer that follows it. Lower `priority` goes first, then lower `arrival`."""

    prompt: list[int]
    sampling: Sampling
    index: int = 0
    """Which of the answers to one request it is: each has random numbers of its own."""
    priority: int = 0
    arrival: int = 0
    adapter: str | None = None
    state: State = "new"
    tokens: list[int] = field(init=False)
    blocks: list[int] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    remembered: int = 0
    """How many of its blocks are in the prefix cache, where others find them."""
    stored: int = 0
    """Positions whose keys and values are in the cache, or will be when the running step is over."""
    draft_stored: int = 0
    """The same for the cache of the draft model."""
    pending: int = 0
    cached: int = 0
    """Positions that were found in the prefix cache when it was first admitted."""
    slot: int = -1
    """Its row in the buffers of the device while it runs."""
    rewound: bool = False
    """Whether its keys are those of a sequence longer than `Limits.rewind_at`."""
    finish: Finish | None = None
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def length(self) -> int:
        """Positions so far, the one being chosen included."""
        return len(self.tokens) + self.pending

    @property
    def longest(self) -> int:
        """Positions of its prompt and of the longest answer it may get."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def generated(self) -> int:
        """Tokens of the answer so far, the one being chosen included."""
        return self.length - len(self.prompt)

    @property
    def answered(self) -> int:
        """Tokens of the answer that are known."""
        return len(self.tokens) - len(self.prompt)

    @property
    def answer(self) -> list[int]:
        """The tokens of the answer."""
        return self.tokens[len(self.prompt) :]

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key of the queue: the smaller goes first."""
        return self.priority, self.arrival, self.index

    @cached_property
    def answer_counts(self) -> Counter[int]:
        """How often each token is in the answer; `append` keeps it."""
        return Counter(self.answer)

    @cached_property
    def seen(self) -> set[int]:
        """Every token of prompt and answer."""
        return set(self.tokens)

    def append(self, token: int) -> None:
        """Add the next token of the answer."""
        if self.sampling.has_penalties:
            self.answer_counts[token] += 1
            self.seen.add(token)
        self.tokens.append(token)

    @property
    def _root(self) -> Digest:
        """The digest before its first block: each adapter has its own, as its keys and values differ."""
        return ROOT if self.adapter is None else self.adapter.encode("utf-8", "surrogatepass")

    def digests_of(self, count: int, block_size: int) -> list[Digest]:
        """The digests of its first `count` blocks, all of which must be full of known tokens."""
        while len(self.digests) < count:
            start = len(self.digests) * block_size
            before = self.digests[-1] if self.digests else self._root
            self.digests.append(block_digest(before, self.tokens[start : start + block_size]))
        return self.digests[:count]
