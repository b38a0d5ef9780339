"""Beam search on top of the engine: at every step each beam is a request for one token and its top log probabilities.

The prefix cache makes that cheap: all but the last positions of a beam are found in blocks that its parent filled. A
hypothesis that ends is scored by its summed log probability divided by (its tokens)^`length_penalty`; the search is
over when no running beam can beat the worst of `width` finished ones at its present length, as in `transformers`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tightfit.errors import UserError
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Answer, Request
from tightfit.serve.requests.sampling import MOST_LOGPROBS, Sampling


@dataclass(frozen=True)
class Hypothesis:
    """The tokens of an answer and the sum of their log probabilities."""

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0


@dataclass
class BeamSearch:
    """A search of `width` beams after `prompt`: run `requests` and pass their answers to `take` until `is_over`."""

    id: str
    prompt: list[int]
    width: int
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    adapter: str | None = None
    length_penalty: float = 1.0
    beams: list[Hypothesis] = field(default_factory=lambda: [Hypothesis()])
    finished: list[Hypothesis] = field(default_factory=list)
    length: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MOST_LOGPROBS // 2:
            raise UserError(f"beams is {self.width}; it must lie between 1 and {MOST_LOGPROBS // 2}")

    @property
    def is_over(self) -> bool:
        """Whether no running beam can beat the finished hypotheses any more."""
        if self.length >= self.max_tokens or not self.beams:
            return True
        if len(self.finished) < self.width:
            return False
        worst = min(self._score(each) for each in self.finished)
        return max(beam.logprob for beam in self.beams) / self.length**self.length_penalty <= worst

    @property
    def best(self) -> list[Hypothesis]:
        """Up to `width` answers, the best first."""
        found = sorted(self.finished + (self.beams if self._includes_running else []), key=self._score, reverse=True)
        return found[: self.width]

    @property
    def _includes_running(self) -> bool:
        return self.length >= self.max_tokens or len(self.finished) < self.width

    def requests(self) -> list[Request]:
        """A request for the next token of every beam."""
        sampling = Sampling(max_tokens=1, temperature=0, logprobs=2 * self.width, seed=0)
        return [
            Request(
                id=f"{self.id}/{self.length}/{i}",
                prompt=[*self.prompt, *beam.tokens],
                sampling=sampling,
                adapter=self.adapter,
            )
            for i, beam in enumerate(self.beams)
        ]

    def take(self, answers: list[Answer]) -> None:
        """Extend the beams by the answers to the last `requests`, given in the same order."""
        candidates = [
            Hypothesis((*beam.tokens, token), beam.logprob + logprob)
            for beam, answer in zip(self.beams, answers, strict=True)
            for token, logprob in answer.logprobs[0].top
        ]
        candidates.sort(key=lambda each: each.logprob, reverse=True)
        self.length += 1
        self.beams = []
        for rank, candidate in enumerate(candidates[: 2 * self.width]):
            if candidate.tokens[-1] in self.stop_ids:
                if rank < self.width:
                    self._keep(candidate)
            elif len(self.beams) < self.width:
                self.beams.append(candidate)

    def _keep(self, candidate: Hypothesis) -> None:
        self.finished = sorted([*self.finished, candidate], key=self._score, reverse=True)[: self.width]

    def _score(self, each: Hypothesis) -> float:
        return each.logprob / max(1, len(each.tokens)) ** self.length_penalty


DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed")
"""Settings of how tokens are drawn."""


def refuse_for_beams(request: Request, usual: Sampling) -> None:
    """Refuse settings that beam search would ignore: it ranks by the model's own probabilities, samples nothing and
    gives one answer.

    `usual` are the settings of a request that names none.
    """
    sampling = request.sampling
    unknown = {
        "n": request.count != 1,
        "stop": bool(sampling.stop),
        "a form of the answer": sampling.grammar is not None,
        "penalties": sampling.has_penalties,
        "logit_bias": bool(sampling.logit_bias),
        **{name: getattr(sampling, name) != getattr(usual, name) for name in DRAWING},
    }
    if found := [name for name, given in unknown.items() if given]:
        raise UserError(
            f"{request.id!r} asks for {' and '.join(found)}, which beams do not have; leave one of them out"
        )


def likeliest_answers(engine: Engine, requests: list[Request], width: int) -> Iterator[tuple[Request, list[Answer]]]:
    """Requests one after another, each with the best answer of a search of `width` beams."""
    for request in requests:
        room = min(request.sampling.max_tokens, engine.max_length - len(request.prompt))
        search = BeamSearch(request.id, request.prompt, width, room, request.sampling.stop_ids, request.adapter)
        while not search.is_over:
            asked = search.requests()
            answers = engine.generate(asked)
            search.take([answers[each.id][0] for each in asked])
        yield request, [_answer(engine, search.best[0], request.sampling.stop_ids)]


def _answer(engine: Engine, best: Hypothesis, stop_ids: frozenset[int]) -> Answer:
    tokens = list(best.tokens)
    stopped = bool(tokens) and tokens[-1] in stop_ids
    text = "" if engine.tokenizer is None else engine.tokenizer.decode(tokens[:-1] if stopped else tokens)
    return Answer(tokens=tokens, text=text, finish="stop" if stopped else "length")
