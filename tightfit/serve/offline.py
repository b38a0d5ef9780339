"""Answers to a file of prompts: JSON lines in, JSON lines out, in any order of finishing, and resumable.

A line in has `prompt` (a text), `tokens` (ids) or `messages` (a chat), optionally an `id` and settings that differ from
the command's. A line out has the id, the texts, why they ended and how many tokens they took. Lines are appended and
flushed as they are ready; a run that was killed goes on with the ids that are not in the output yet (its last line, if
the kill cut it, is dropped).
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tightfit.errors import UserError
from tightfit.models.generate import prompt_tokens
from tightfit.models.tokenizer import Tokenizer
from tightfit.serve.engine import Engine
from tightfit.serve.request import Answer, Request
from tightfit.serve.sampling import Sampling

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
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text") from None
    found = [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError(f"{path} has no prompts")
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
        raise UserError(f"{path}, line {number} is not JSON") from None
    given = {"prompt": given} if isinstance(given, str) else given
    if not isinstance(given, dict) or sum(key in given for key in ("prompt", "tokens", "messages")) != 1:
        raise UserError(f"{path}, line {number} needs one of prompt, tokens and messages")
    return Prompt(str(given.get("id", number)), number, given)


def finished_ids(path: Path) -> set[str]:
    """The ids that `path` has answers to; a line that was cut off is taken away."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    try:
        return {str(json.loads(line)["id"]) for line in whole.splitlines() if line.strip()}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is there already and is no output of ours; give another name") from None


def to_request(prompt: Prompt, tokenizer: Tokenizer, base: Sampling, path: Path) -> Request:
    """What the engine is asked for one line."""
    given = prompt.given
    changes = {key: given[key] for key in SETTINGS & given.keys()}
    if isinstance(changes.get("stop"), list):
        changes["stop"] = tuple(changes["stop"])
    try:
        sampling = replace(base, **changes)
        return Request(
            id=prompt.id,
            prompt=_tokens(given, tokenizer),
            sampling=sampling,
            count=int(given.get("n", 1)),
            priority=int(given.get("priority", 0)),
            adapter=None if given.get("adapter") is None else str(given["adapter"]),
        )
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"{path}, line {prompt.line}: {error}") from None


def _tokens(given: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    if "tokens" in given:
        return [int(token) for token in given["tokens"]]
    if "messages" in given:
        text = tokenizer.render_chat(given["messages"], add_generation_prompt=True)
        return tokenizer.encode(text, parse_special=True)
    if not isinstance(given["prompt"], str):
        raise UserError("prompt is not a text")
    return prompt_tokens(tokenizer, given["prompt"], chat=False)


def answer_file(
    engine: Engine,
    source: Path,
    target: Path,
    sampling: Sampling,
    on_finished: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Answer what `source` asks and `target` has not answered yet; returns how many were answered now."""
    assert engine.tokenizer is not None
    prompts = read_prompts(source)
    done = finished_ids(target)
    requests = [to_request(each, engine.tokenizer, sampling, source) for each in prompts if each.id not in done]
    for request in requests:
        engine.check(request)
    finished = len(prompts) - len(requests)
    on_finished(finished, len(prompts))
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("a", encoding="utf-8") as out:
        for request, answers in finished_requests(engine, requests):
            out.write(json.dumps(_line(request, answers), ensure_ascii=False) + "\n")
            out.flush()
            finished += 1
            on_finished(finished, len(prompts))
    return len(requests)


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
