"""Constrained decoding: answers that follow a JSON schema, a regular expression, or a grammar, through `llguidance`.

A grammar allows some tokens at each place; all others get the logit −∞ before anything else is decided. llguidance
(Lark-like grammars, JSON Schema, regular expressions over the tokenizer's own tokens) computes which, in microseconds.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.models.text.tokenizer import Tokenizer

Kind = Literal["json", "json_schema", "regex", "lark"]
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as json.dumps writes it: where spaces are free, some models write nothing else."""
FORMS = ("guided_regex", "guided_grammar", "guided_json", "response_format")
"""Fields by which a request asks for a grammar; the first that is given decides."""
LARGEST_TEXT = 2**17
"""Characters of a grammar: twice as many take four times as long to compile, these about a second."""
MOST_KEPT = 16
"""Compiled grammars that are kept for the next request."""
INSTALL = "pip install 'tightfit[serve]'"


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like: any JSON object, JSON of a schema, a regular expression, or a Lark grammar."""

    kind: Kind
    text: str = ""


def asked_grammar(given: Mapping[str, Any]) -> Grammar | None:
    """The grammar that a request asks for in one of FORMS, the names that other servers use; None without."""
    asked = {name: given[name] for name in FORMS if given.get(name) is not None}
    for name, kind in (("guided_regex", "regex"), ("guided_grammar", "lark")):
        if name in asked:
            return Grammar(kind, _text(asked[name], name))  # type: ignore[arg-type]
    if "guided_json" in asked:
        return Grammar("json_schema", _schema(asked["guided_json"], "guided_json"))
    form = asked.get("response_format")
    if form is None or (isinstance(form, dict) and form.get("type") == "text"):
        return None
    given_type = form.get("type") if isinstance(form, dict) else form
    if given_type == "json_object":
        return Grammar("json")
    if given_type != "json_schema" or not isinstance(form, dict):
        raise UserError(f"response_format is of type {given_type!r}; use text, json_object or json_schema")
    if not isinstance(form.get("json_schema"), dict):
        raise UserError("response_format is of type json_schema, but has no json_schema")
    return Grammar("json_schema", _schema(form["json_schema"].get("schema", {}), "schema"))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{name} is {value!r}; give a text")
    return value


def _schema(value: Any, name: str) -> str:
    if not isinstance(value, dict | str):
        raise UserError(f"{name} is {value!r}; give an object")
    return value if isinstance(value, str) else json.dumps(value)


class Constraints:
    """Makes matchers for one tokenizer, in any thread. Reading its vocabulary is slow and happens once; grammars that
    were asked for lately are kept compiled."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._guidance = _import()
        self.vocab_size = vocab_size
        self._tokenizer = _guidance_tokenizer(tokenizer, vocab_size)
        self._begun: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: Grammar) -> "Matcher":
        """A matcher at the beginning of an answer; a mistake in the grammar is a UserError."""
        with self._lock:
            begun = self._begun.get(grammar)
        if begun is None:
            begun = self._begin(grammar)
            with self._lock:
                self._begun[grammar] = begun
                if len(self._begun) > MOST_KEPT:
                    self._begun.popitem(last=False)
        return Matcher(begun.deep_copy(), self.vocab_size)

    def _begin(self, grammar: Grammar) -> Any:
        if len(grammar.text) > LARGEST_TEXT:
            raise UserError(
                f"the {grammar.kind} that the answer must follow has {len(grammar.text):,} characters; "
                f"give at most {LARGEST_TEXT:,}"
            )
        matcher = self._guidance.LLMatcher(self._tokenizer, self._compiled(grammar))
        told = f"the {grammar.kind} that the answer must follow is refused"
        if matcher.is_error():
            raise UserError(f"{told}: {_short(matcher.get_error())}")
        Matcher(matcher, self.vocab_size).allowed()  # may take seconds, which no step should: copies know most of it
        if matcher.is_error():
            raise UserError(f"{told}: no answer can begin with it, or it is too complex")
        return matcher

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
    """The state of one answer in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._words = np.empty((1, -(-vocab_size // 32)), dtype=np.int32)

    def allowed(self) -> Tensor:
        """Which tokens may come next, [V] of booleans."""
        import llguidance.numpy  # llguidance.torch imports torch's compiler: seconds in which no answer goes on

        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._words)
        bits = torch.arange(32, dtype=torch.int32)
        return ((torch.from_numpy(self._words[0])[:, None] >> bits) & 1).bool().flatten()[: self._vocab_size]

    def advance(self, token: int) -> None:
        """The answer goes on with `token`."""
        self._matcher.consume_token(token)

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())

    @property
    def has_failed(self) -> bool:
        """Whether the form turned out too complex to go on with: only the end of text is allowed then, wherever the
        answer is."""
        return bool(self._matcher.is_error())


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
