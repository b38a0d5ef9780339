"""The loss mask of a conversation: which characters are the assistant's, and so which tokens.

Tokenizing messages one by one gives other ids than tokenizing the whole text, as inference does; searching for header
tokens breaks with every new template. So the template tells: an answer starts where the conversation before it,
rendered with the generation prompt, ends, and it ends where the conversation including it does. Both renderings must
be prefixes of the whole text. Templates that rewrite history (such as dropping earlier reasoning) fail that and are
refused, unless they mark answers with `{% generation %}`.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tightfit.errors import UserError

Span = tuple[int, int]
"""First character, and one past the last."""


class Render(Protocol):
    """Renders a conversation, with or without the header of the answer to come."""

    def __call__(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> str: ...


def has_generation_marks(template: str) -> bool:
    """Whether the template marks the assistant's text with `{% generation %}`."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def answer_spans(messages: Sequence[dict[str, Any]], text: str, render: Render, special: frozenset[str]) -> list[Span]:
    """Where the assistant's answers lie in `text`, the rendering of `messages`."""
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if index == 0:
            raise UserError("the conversation begins with an assistant's answer; put a user or system message first")
        before = render(messages[:index], add_generation_prompt=True)
        until = render(messages[: index + 1], add_generation_prompt=False)
        if not (text.startswith(until) and until.startswith(before)):
            raise UserError(
                f"the chat template lays out message {index} differently depending on what follows, so its tokens are "
                "not those of inference; train on conversations with one answer, or on a template that "
                "marks answers with {% generation %}"
            )
        spans.append((len(before), len(before) + _spoken_length(until[len(before) :], special)))
    return spans


def _spoken_length(answer: str, special: frozenset[str]) -> int:
    """Length of `answer` up to and including its end-of-turn token, without the line break templates put after it."""
    stripped = answer.rstrip()
    return len(stripped) if stripped.endswith(tuple(special)) else len(answer)


def token_mask(offsets: Sequence[Span], spans: Iterable[Span], length: int) -> list[bool]:
    """For each token whether its characters reach into one of `spans`; `length` is that of the text."""
    spoken = bytearray(length)
    for start, end in spans:
        spoken[start:end] = b"\1" * (end - start)
    return [1 in spoken[start:end] for start, end in offsets]
