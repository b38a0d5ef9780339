"""How the tokens of a request are chosen: all settings of a client, checked once, when a `Sampling` is made.

The order of the steps is the usual one: logit bias and penalties change the logits; temperature divides them; top-k,
top-p, min-p and typical-p each cut what the one before left. Temperature 0 takes the likeliest token.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from tightfit.errors import UserError
from tightfit.serve.requests.grammar import Grammar

LARGEST_SEED = 2**63 - 1
MOST_LOGPROBS = 20
WHOLE_NUMBERS = ("max_tokens", "top_k", "seed")
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
LEAST_TEMPERATURE = 1e-5
"""Below it the likeliest token is taken: logits divided by less leave the range of float32."""
NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings of one request. With the defaults, tokens are drawn from the model's own distribution."""

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    """Divides (positive) or multiplies (negative) the logits of tokens in the prompt or the answer (CTRL, 2019)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer already has."""
    frequency_penalty: float = 0.0
    """Subtracted from them once for every time the answer has the token."""
    logit_bias: Mapping[int, float] = field(default_factory=lambda: NO_BIAS)
    seed: int = field(default_factory=lambda: secrets.randbits(62))
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    """None: none. n: the chosen token's, and the n likeliest at its place."""
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        _need(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _need(0 <= self.temperature <= 100, "temperature", self.temperature, "between 0 (greedy) and 100")
        _need(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _need(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1 (off)")
        _need(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 (off) and 1")
        _need(0 < self.typical_p <= 1, "typical_p", self.typical_p, "above 0 and at most 1 (off)")
        _need(0.01 <= self.repetition_penalty <= 100, "repetition_penalty", self.repetition_penalty, "from 0.01 to 100")
        for name in ("presence_penalty", "frequency_penalty"):
            _need(-100 <= getattr(self, name) <= 100, name, getattr(self, name), "between -100 and 100")
        _need(0 <= self.seed <= LARGEST_SEED, "seed", self.seed, f"between 0 and {LARGEST_SEED}")
        _need(all(self.stop), "stop", "''", "a text of at least one character")
        _need(self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS, "logprobs", self.logprobs, "from 0 to 20")
        for token, bias in self.logit_bias.items():
            _need(token >= 0 and -100 <= bias <= 100, f"logit_bias of {token}", bias, "a token id's from -100 to 100")

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < LEAST_TEMPERATURE

    @cached_property
    def has_penalties(self) -> bool:
        """Whether logits are changed by the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def needs_host(self) -> bool:
        """Whether the host takes part in choosing a token: with penalties, a grammar, log probabilities or a bias."""
        return self.has_penalties or self.grammar is not None or self.logprobs is not None or bool(self.logit_bias)


def _check_types(sampling: Sampling) -> None:
    """Numbers where numbers belong: a line of JSON can say anything."""
    for name in WHOLE_NUMBERS:
        value = getattr(sampling, name)
        _need(type(value) is int, name, repr(value), "a whole number")
    for name in NUMBERS:
        value = getattr(sampling, name)
        _need(type(value) in (int, float), name, repr(value), "a number")
    stop, bias, logprobs = sampling.stop, sampling.logit_bias, sampling.logprobs
    texts = isinstance(stop, tuple) and all(isinstance(each, str) for each in stop)
    _need(texts, "stop", repr(stop), "a list of texts")
    _need(logprobs is None or type(logprobs) is int, "logprobs", repr(logprobs), "a whole number")
    _need(isinstance(bias, Mapping), "logit_bias", repr(bias), "an object of token ids and numbers")
    for token, value in bias.items():
        _need(type(value) in (int, float), f"logit_bias of {token}", repr(value), "a number")


def _need(holds: bool, name: str, value: object, what: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value}; it must be {what}")
