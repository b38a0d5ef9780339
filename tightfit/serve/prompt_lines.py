"""The lines of a file of prompts, and the requests to an engine that they become.

A line has `prompt` (a text), `tokens` (ids) or `messages` (a chat), optionally an `id` and settings that differ from
the command's. Its settings are checked without a model (`check_settings`), as one may take minutes to load.
"""

import difflib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tightfit.bounded_files import read_bounded
from tightfit.errors import UserError
from tightfit.models.generate import prompt_tokens
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.serve.requests.grammar import FORMS, asked_grammar
from tightfit.serve.requests.request import MOST_ANSWERS, Request
from tightfit.serve.requests.sampling import Sampling

MOST_PROMPT_BYTES = 2**30
SETTINGS = frozenset(each.name for each in fields(Sampling)) - {"grammar", "stop_ids"}
UNDONE = {
    **dict.fromkeys(("max_completion_tokens", "max_new_tokens"), "use max_tokens"),
    **dict.fromkeys(("best_of", "echo", "suffix"), "leave it out"),
    **dict.fromkeys(
        ("chat_template_kwargs", "ignore_eos", "tool_choice", "tools"), "leave it out, or ask `tightfit serve`"
    ),
}
"""Fields of servers and of `transformers` that change an answer and have no effect here. Others are the user's own."""
ALIKE = 0.85
"""How like a setting's name another one is that was meant to be it."""


@dataclass(frozen=True)
class Prompt:
    """One line of the input."""

    source: Path
    line: int
    id: str
    given: dict[str, Any]

    @property
    def place(self) -> str:
        """Its file and line, for error messages."""
        return f"{self.source}, line {self.line}"


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts in `path`; all of it is checked before anything is computed."""
    try:
        lines = read_bounded(path, MOST_PROMPT_BYTES, "a file of prompts").decode("utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a file of JSON lines") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; give a file of JSON lines") from None
    found = [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError(f'{path} has no prompts; write one a line, as {{"prompt": "…"}}')
    seen: dict[str, int] = {}
    for prompt in found:
        if prompt.id in seen:
            raise UserError(f"{path} has the id {prompt.id!r} in lines {seen[prompt.id]} and {prompt.line}")
        seen[prompt.id] = prompt.line
    return found


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{path}, line {number} is not JSON; write one object a line") from None
    given = {"prompt": given} if isinstance(given, str) else given
    if isinstance(given, dict):  # a table written as JSON has null where a row lacks a column
        given = {key: value for key, value in given.items() if value is not None}
    if not isinstance(given, dict) or sum(key in given for key in ("prompt", "tokens", "messages")) != 1:
        raise UserError(f"{path}, line {number} needs one of prompt, tokens and messages")
    name = str(given.get("id", number)).encode("utf-8", "replace").decode()  # as it will be written
    return Prompt(path, number, name, given)


def check_settings(prompts: Iterable[Prompt], base: Sampling) -> None:
    """Refuse lines whose settings are wrong, whatever the model."""
    for prompt in prompts:
        with _told_where(prompt):
            _sampling(prompt.given, base)
            _count(prompt.given)


def to_request(prompt: Prompt, tokenizer: Tokenizer, base: Sampling) -> Request:
    """The request to the engine for one line; settings that the line does not name are those of `base`."""
    given = prompt.given
    with _told_where(prompt):
        return Request(
            id=prompt.id,
            prompt=_tokens(given, tokenizer),
            sampling=_sampling(given, base),
            count=_count(given),
            priority=_whole("priority", given.get("priority", 0)),
            adapter=None if given.get("adapter") is None else str(given["adapter"]),
        )


@contextmanager
def _told_where(prompt: Prompt) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{prompt.place}: {error}") from None


def _sampling(given: dict[str, Any], base: Sampling) -> Sampling:
    for name in given.keys() - SETTINGS - set(FORMS):
        _refuse_ignored(name)
    changes = {key: given[key] for key in SETTINGS & given.keys()}
    if isinstance(stop := changes.get("stop"), str | list):
        changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    changes["grammar"] = asked_grammar(given)
    if isinstance(changes.get("logit_bias"), dict):  # JSON has texts for keys
        changes["logit_bias"] = {_whole("logit_bias", key): bias for key, bias in changes["logit_bias"].items()}
    sampling = replace(base, **changes)
    if sampling.logprobs is not None:
        raise UserError(f"logprobs is {sampling.logprobs}, but a file of answers has none; leave it out")
    return sampling


def _refuse_ignored(name: str) -> None:
    """Refuse a field that says how to answer and would have no effect, such as a setting that is misspelt."""
    if name in UNDONE:
        raise UserError(f"{name} has no effect here; {UNDONE[name]}")
    if near := difflib.get_close_matches(name, (*SETTINGS, *FORMS), n=1, cutoff=ALIKE):
        raise UserError(f"{name} is no setting; did you mean {near[0]}?")


def _count(given: dict[str, Any]) -> int:
    count = _whole("n", given.get("n", 1))
    if not 1 <= count <= MOST_ANSWERS:
        raise UserError(f"n is {count}; it must lie between 1 and {MOST_ANSWERS}")
    return count


def _whole(name: str, value: Any) -> int:
    try:
        number = int(value)
        if not isinstance(value, bool) and number == float(value):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise UserError(f"{name} is {value!r}; give a whole number")


def _tokens(given: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    for name in ("tokens", "messages"):
        if name in given and not isinstance(given[name], list):
            raise UserError(f"{name} is {given[name]!r}; give a list")
    if "tokens" in given:
        return [_whole("a token", token) for token in given["tokens"]]
    if "messages" in given:
        text = tokenizer.render_chat(given["messages"], add_generation_prompt=True)
        return tokenizer.encode(text, parse_special=True)
    if not isinstance(given["prompt"], str):
        raise UserError(f"prompt is {given['prompt']!r}; give a text")
    return prompt_tokens(tokenizer, given["prompt"], chat=False)
