"""Answers to a file of prompts: JSON lines in, JSON lines out in the order in which they finish, and resumable.

Lines in are in prompt_lines.py. A line out has the id, the texts, why they ended and how many tokens they took. Lines
are appended and flushed as they are ready; a run that was killed goes on with the ids that are not in the output yet
(its last line, if the kill cut it, is dropped). A line out also has a digest of its prompt and settings (`asked`): a
run that goes on with other prompts or settings is refused. One process at a time writes to an output, and no file of
the user's is changed.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tightfit.bounded_files import require_regular
from tightfit.durable import NO_ROOM
from tightfit.errors import UserError
from tightfit.serve.beam import likeliest_answers, refuse_for_beams
from tightfit.serve.engine import Engine
from tightfit.serve.prompt_lines import MOST_PROMPT_BYTES, SETTINGS, Prompt, to_request
from tightfit.serve.requests.request import Answer, Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.writer_lock import locked_beside

BEGINNING = b'{"id": "'
"""How every line that we write begins."""
ANSWER_FIELDS = {"id", "text", "finish_reason", "usage"}
ASKED = "asked"
"""The field for the digest of prompt and settings; lines of earlier versions have none."""
DIGEST_BYTES = 8


@dataclass(frozen=True)
class Finished:
    """What an output has already: digests (`asked`) of its answers by id, and the bytes of its whole lines."""

    asked: Mapping[str, str | None] = field(default_factory=dict)
    whole_bytes: int = 0


def read_finished(path: Path) -> Finished:
    """The answers that `path` has, which must be an output of ours; a line that a kill cut off does not count."""
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
    asked: dict[str, str | None] = {}
    whole_bytes = 0
    while line := file.readline(MOST_PROMPT_BYTES):
        if not line.endswith(b"\n"):
            if not BEGINNING.startswith(line[: len(BEGINNING)]) or _is_another_object(line):
                raise ValueError("no line of ours begins like this, or ends without a line break")
            break
        row = json.loads(line)
        if row.keys() - {ASKED} != ANSWER_FIELDS:
            raise KeyError(*row)
        asked[str(row["id"])] = row.get(ASKED)
        whole_bytes += len(line)
    return Finished(asked, whole_bytes)


def _is_another_object(line: bytes) -> bool:
    try:
        return json.loads(line).keys() - {ASKED} != ANSWER_FIELDS
    except (ValueError, AttributeError, RecursionError):
        return False


def _check_request(engine: Engine, prompt: Prompt, request: Request) -> None:
    """Refuse what the engine cannot answer."""
    try:
        engine.check(request)
    except UserError as error:
        raise UserError(f"{prompt.place}: {error}") from None


def asked_digest(request: Request, beams: int) -> str:
    """A digest of everything but the model that an answer depends on; of `max_tokens` alone among the settings of a
    beam search, which samples nothing."""
    sampling = request.sampling
    names = SETTINGS - {"logit_bias"} if beams == 1 else {"max_tokens"}
    settings = {name: getattr(sampling, name) for name in sorted(names)}
    grammar = None if sampling.grammar is None else (sampling.grammar.kind, sampling.grammar.text)
    asked = (request.prompt, settings, sorted(sampling.logit_bias.items()), grammar, request.count, request.adapter)
    return hashlib.blake2b(json.dumps((*asked, beams)).encode(), digest_size=DIGEST_BYTES).hexdigest()


def answer_prompts(
    engine: Engine,
    prompts: list[Prompt],
    target: Path,
    sampling: Sampling,
    on_finished: Callable[[int, int], None] = lambda done, total: None,
    beams: int = 1,
) -> int:
    """Answer the prompts that `target` has no answers to yet; returns how many were answered now.

    With several `beams` nothing is sampled: an answer is the likeliest that a beam search finds.
    """
    assert engine.tokenizer is not None
    batch = PromptBatch(target, beams, prompts, [to_request(each, engine.tokenizer, sampling) for each in prompts])
    for prompt, request in batch.unanswered(read_finished(target)):
        _check_request(engine, prompt, request)
        if beams > 1:
            refuse_for_beams(request, sampling)
    with _writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked_beside(target):
            finished = read_finished(target)  # again: under the lock no other process writes
            left = [request for _, request in batch.unanswered(finished)]
            on_finished(len(prompts) - len(left), len(prompts))
            answered = finished_requests(engine, left) if beams == 1 else likeliest_answers(engine, left, beams)
            lines = (_line(request, answers, beams) for request, answers in answered)
            _append(lines, target, finished, lambda count: on_finished(len(prompts) - len(left) + count, len(prompts)))
    return len(left)


@dataclass(frozen=True)
class PromptBatch:
    """Prompts and their requests to the engine, whose answers go to `target`."""

    target: Path
    beams: int
    prompts: list[Prompt]
    requests: list[Request]

    def unanswered(self, finished: Finished) -> list[tuple[Prompt, Request]]:
        """Prompts that are not in `finished`; a UserError where a finished one had another prompt or other settings."""
        left = []
        for prompt, request in zip(self.prompts, self.requests, strict=True):
            if prompt.id not in finished.asked:
                left.append((prompt, request))
            elif finished.asked[prompt.id] not in (None, asked_digest(request, self.beams)):
                raise UserError(
                    f"{prompt.place}: the answer to {prompt.id!r} in {self.target} is to another prompt or was asked "
                    "with other settings; ask as before, or name another --out"
                )
        return left


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "make room and run the same again" if error.errno in NO_ROOM else "name another --out"
        raise UserError(f"cannot write {target}: {error.strerror}; {fix}") from error


def _append(lines: Iterator[dict[str, Any]], target: Path, done: Finished, on_line: Callable[[int], None]) -> None:
    """Append lines to the whole ones of `target`, each as it comes; `on_line` is called with their number."""
    with target.open("ab") as out:
        out.truncate(done.whole_bytes)
        for count, line in enumerate(lines, 1):
            out.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            out.flush()
            on_line(count)


def finished_requests(engine: Engine, requests: list[Request]) -> Iterator[tuple[Request, list[Answer]]]:
    """Requests with their answers, in the order in which they finish; the engine gets twice as many as it can run."""
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


def _line(request: Request, answers: list[Answer], beams: int) -> dict[str, Any]:
    usage = {"prompt_tokens": len(request.prompt), "completion_tokens": sum(len(each.tokens) for each in answers)}
    texts = [each.text for each in answers]
    return {
        "id": request.id,
        "text": texts[0] if len(texts) == 1 else texts,
        "finish_reason": answers[0].finish if len(texts) == 1 else [each.finish for each in answers],
        "usage": usage,
        ASKED: asked_digest(request, beams),
    }
