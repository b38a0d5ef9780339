"""Answers as iterators of text, for callers without an event loop: of an engine, or of one made for a prompt."""

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from tightfit.errors import UserError
from tightfit.models.generate import check_numbers, prompt_tokens
from tightfit.models.loading import LoadedModel
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling

WORTH_A_COPY = 256
"""Tokens of an answer from which a 16-bit copy of the weights saves more time than making it takes."""


def sample_streams(
    loaded: LoadedModel, text: str, sampling: Sampling, *, count: int = 1, chat: bool = False
) -> list[Iterator[str]]:
    """`count` continuations of `text` (with `chat`, answers to it) by an engine just large enough for them."""
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise UserError(f"{loaded.source} has no tokenizer, so it cannot continue text")
    if not text.strip():
        raise UserError("the prompt is empty; give some text with -p")
    return token_streams(loaded, prompt_tokens(tokenizer, text, chat=chat), sampling, count=count)


def token_streams(loaded: LoadedModel, prompt: list[int], sampling: Sampling, *, count: int = 1) -> list[Iterator[str]]:
    """Streams of text that continue a prompt of token ids."""
    tokenizer, positions = loaded.tokenizer, loaded.model.spec.max_positions
    assert tokenizer is not None, "whose prompt is this?"
    check_numbers(loaded.model)
    if len(prompt) + sampling.max_tokens > positions > len(prompt):
        left = positions - len(prompt)
        print(f"tightfit: {sampling.max_tokens} tokens do not fit the {left} positions that are left", file=sys.stderr)
    longest = min(len(prompt) + sampling.max_tokens, positions)
    config = EngineConfig(
        max_sequences=count,
        step_tokens=max(EngineConfig.step_tokens, count),
        max_length=max(longest, 1),
        graphs=False,
        packed_products=not loaded.exact,
        rounded_weights=loaded.rounded,
        half_weights=sampling.max_tokens >= WORTH_A_COPY,
    )
    request = Request(id="sample", prompt=prompt, sampling=replace(sampling, stop_ids=tokenizer.stop_ids), count=count)
    return text_streams(Engine(loaded.model, tokenizer, config), request)


def text_streams(engine: Engine, request: Request) -> list[Iterator[str]]:
    """One stream per answer. All advance together: while one is read, the others' pieces wait."""
    engine.submit(request)
    waiting: list[deque[str]] = [deque() for _ in range(request.count)]
    over = [False] * request.count

    def advance() -> None:
        for output in engine.step():
            waiting[output.index].append(output.text)
            over[output.index] = output.finish is not None

    def stream(index: int) -> Iterator[str]:
        while waiting[index] or not over[index]:
            if waiting[index]:
                yield waiting[index].popleft()
            else:
                advance()

    return [stream(index) for index in range(request.count)]
