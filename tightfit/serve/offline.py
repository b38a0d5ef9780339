"""Answers to a file of prompts: JSON lines in, JSON lines out, in any order of finishing, and resumable.

A line in has `prompt` (a text), `tokens` (ids) or `messages` (a chat), optionally an `id` and settings that differ from
the command's. A line out has the id, the texts, why they ended and how many tokens they took. Lines are appended and
flushed as they are ready; a run that was killed goes on with the ids that are not in the output yet (its last line, if
the kill cut it, is dropped). One process at a time writes to an output, and no file of the user's is changed.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from tightfit.bounded_files import read_bounded, require_regular
from tightfit.errors import UserError
from tightfit.models.generate import prompt_tokens
from tightfit.models.tokenizer import Tokenizer
from tightfit.serve.beam import likeliest_answers, refuse_for_beams
from tightfit.serve.engine import Engine
from tightfit.serve.requests.grammar import asked_grammar
from tightfit.serve.requests.request import Answer, Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.writer_lock import locked_beside

MOST_PROMPT_BYTES = 2**30
BEGINNING = b'{"id": "'
"""Of every line we write."""
ANSWER_FIELDS = {"id", "text", "finish_reason", "usage"}
SETTINGS = frozenset(each.name for each in fields(Sampling)) - {"grammar", "stop_ids"}


@dataclass(frozen=True)
class Prompt:
    """One line of the input."""

    id: str
    line: int
    given: dict[str, Any]


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
    if not isinstance(given, dict) or sum(key in given for key in ("prompt", "tokens", "messages")) != 1:
        raise UserError(f"{path}, line {number} needs one of prompt, tokens and messages")
    return Prompt(str(given.get("id", number)), number, given)


@dataclass(frozen=True)
class Finished:
    """What an output has already: the ids it answers, and the bytes of whole lines they take."""

    ids: frozenset[str] = frozenset()
    whole_bytes: int = 0


def read_finished(path: Path) -> Finished:
    """What `path` has answers to, as we wrote them; a line that a kill cut off does not count. Nothing is changed."""
    try:
        require_regular(path)
        with path.open("rb") as file:
            return _finished(file)
    except FileNotFoundError:
        return Finished()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give another name") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is there already and is no output of ours; give another name") from None


def _finished(file: BinaryIO) -> Finished:
    ids, whole_bytes = set(), 0
    while line := file.readline(MOST_PROMPT_BYTES):
        if not line.endswith(b"\n"):
            if not BEGINNING.startswith(line[: len(BEGINNING)]) or _is_another_object(line):
                raise ValueError("no line of ours begins like this, or ends without a line break")
            break
        row = json.loads(line)
        if row.keys() != ANSWER_FIELDS:
            raise KeyError(*row)
        ids.add(str(row["id"]))
        whole_bytes += len(line)
    return Finished(frozenset(ids), whole_bytes)


def _is_another_object(line: bytes) -> bool:
    try:
        return json.loads(line).keys() != ANSWER_FIELDS
    except (ValueError, AttributeError, RecursionError):
        return False


def _checked_request(engine: Engine, prompt: Prompt, base: Sampling, path: Path) -> Request:
    """What the engine is asked for one line, which it can answer."""
    assert engine.tokenizer is not None
    request = to_request(prompt, engine.tokenizer, base, path)
    try:
        engine.check(request)
    except UserError as error:
        raise UserError(f"{path}, line {prompt.line}: {error}") from None
    return request


def to_request(prompt: Prompt, tokenizer: Tokenizer, base: Sampling, path: Path) -> Request:
    """What the engine is asked for one line."""
    given = prompt.given
    changes = {key: given[key] for key in SETTINGS & given.keys()}
    if isinstance(stop := changes.get("stop"), str | list):
        changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    try:
        changes["grammar"] = asked_grammar(given)
        if isinstance(changes.get("logit_bias"), dict):  # JSON has texts for keys
            changes["logit_bias"] = {_whole("logit_bias", key): bias for key, bias in changes["logit_bias"].items()}
        sampling = replace(base, **changes)
        return Request(
            id=prompt.id,
            prompt=_tokens(given, tokenizer),
            sampling=sampling,
            count=_whole("n", given.get("n", 1)),
            priority=_whole("priority", given.get("priority", 0)),
            adapter=None if given.get("adapter") is None else str(given["adapter"]),
        )
    except UserError as error:
        raise UserError(f"{path}, line {prompt.line}: {error}") from None


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


def answer_file(
    engine: Engine,
    source: Path,
    target: Path,
    sampling: Sampling,
    on_finished: Callable[[int, int], None] = lambda done, total: None,
    beams: int = 1,
) -> int:
    """Answer what `source` asks and `target` has not answered yet; returns how many were answered now.

    With several `beams` no token is drawn: an answer is the likeliest that a beam search finds.
    """
    assert engine.tokenizer is not None
    prompts = read_prompts(source)
    done = read_finished(target).ids
    requests = [_checked_request(engine, each, sampling, source) for each in prompts if each.id not in done]
    if beams > 1:
        for request in requests:
            refuse_for_beams(request)
    with _writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked_beside(target):
            finished = read_finished(target)  # as it is now that nobody else writes
            left = [request for request in requests if request.id not in finished.ids]
            on_finished(len(prompts) - len(left), len(prompts))
            made = finished_requests(engine, left) if beams == 1 else likeliest_answers(engine, left, beams)
            _append(made, target, finished, lambda count: on_finished(len(prompts) - len(left) + count, len(prompts)))
    return len(left)


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}; make room and run the same again") from error


def _append(
    made: Iterator[tuple[Request, list[Answer]]], target: Path, done: Finished, told: Callable[[int], None]
) -> None:
    """Write answers into `target` as they are made, behind the whole lines it has."""
    with target.open("ab") as out:
        out.truncate(done.whole_bytes)
        for count, (request, answers) in enumerate(made, 1):
            out.write(json.dumps(_line(request, answers), ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            out.flush()
            told(count)


def finished_requests(engine: Engine, requests: list[Request]) -> Iterator[tuple[Request, list[Answer]]]:
    """Requests with their answers as they are over; a few more than can run are with the engine at a time."""
    waiting = iter(requests)
    open_requests: dict[str, Request] = {}
    answers: dict[str, list[Answer]] = {}
    room = 2 * engine.config.max_sequences
    while True:
        while len(open_requests) < room and (request := next(waiting, None)) is not None:
            engine.submit(request)
            open_requests[request.id] = request
            answers[request.id] = [Answer() for _ in range(request.count)]
        if not open_requests:
            return
        for output in engine.step():
            own = answers[output.request]
            own[output.index].add(output)
            if all(each.finish is not None for each in own):
                yield open_requests.pop(output.request), answers.pop(output.request)


def _line(request: Request, answers: list[Answer]) -> dict[str, Any]:
    usage = {"prompt_tokens": len(request.prompt), "completion_tokens": sum(len(each.tokens) for each in answers)}
    texts = [each.text for each in answers]
    return {
        "id": request.id,
        "text": texts[0] if len(texts) == 1 else texts,
        "finish_reason": answers[0].finish if len(texts) == 1 else [each.finish for each in answers],
        "usage": usage,
    }
