"""Output that must have a form: JSON of a schema, a regular expression, or a grammar, through `llguidance`.

A grammar allows some tokens at each place; all others get the logit −∞ before anything else is decided. llguidance
(Lark-like grammars, JSON Schema, regular expressions over the tokenizer's own tokens) computes which, in microseconds.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.models.tokenizer import Tokenizer

Kind = Literal["json", "json_schema", "regex", "lark"]
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as json.dumps writes it: where spaces are free, some models write nothing else."""
INSTALL = "pip install 'tightfit[serve]'"


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like: any JSON object, JSON of a schema, a regular expression, or a Lark grammar."""

    kind: Kind
    text: str = ""


class Constraints:
    """Makes matchers for one tokenizer; reading its vocabulary is the slow part and happens once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._guidance = _import()
        self.vocab_size = vocab_size
        self._tokenizer = _guidance_tokenizer(tokenizer, vocab_size)

    def matcher(self, grammar: Grammar) -> "Matcher":
        """A matcher at the beginning of an answer; a mistake in the grammar is the user's."""
        compiled = self._compiled(grammar)
        made = self._guidance.LLMatcher(self._tokenizer, compiled)
        if made.is_error():
            raise UserError(f"the {grammar.kind} that the answer must follow is refused: {_short(made.get_error())}")
        return Matcher(made, self._guidance, self.vocab_size)

    def _compiled(self, grammar: Grammar) -> str:
        matcher = self._guidance.LLMatcher
        try:
            match grammar.kind:
                case "json":
                    return str(matcher.grammar_from_json_schema('{"type": "object"}', defaults=JSON_LAYOUT))
                case "json_schema":
                    return str(matcher.grammar_from_json_schema(grammar.text, defaults=JSON_LAYOUT))
                case "regex":
                    return str(matcher.grammar_from_regex(grammar.text))
                case "lark":
                    return str(matcher.grammar_from_lark(grammar.text))
        except ValueError as error:
            raise UserError(f"the {grammar.kind} that the answer must follow is refused: {_short(error)}") from None


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: Any, guidance: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._words = torch.empty(1, -(-vocab_size // 32), dtype=torch.int32)

    def allowed(self) -> Tensor:
        """Which tokens may come next, [V] of booleans."""
        import llguidance.torch

        llguidance.torch.fill_next_token_bitmask(self._matcher, self._words)
        bits = torch.arange(32, dtype=torch.int32)
        return ((self._words[0, :, None] >> bits) & 1).bool().flatten()[: self._vocab_size]

    def advance(self, token: int) -> None:
        """The answer goes on with `token`."""
        self._matcher.consume_token(token)

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())


def _import() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise UserError(f"answers of a given form need llguidance, which is not installed: {INSTALL}") from None
    return llguidance


def _guidance_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> Any:
    import llguidance

    stop = tokenizer.eos_id
    if stop is None:
        raise UserError("the tokenizer has no end-of-text token, which an answer of a given form has to end with")
    ends = sorted(tokenizer.stop_ids, key=lambda token: token != stop)
    return llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=max(vocab_size, tokenizer.vocab_size), eos_token=ends)


def _short(error: object) -> str:
    return " ".join(str(error).split())[:200]
