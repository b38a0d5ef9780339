"""Responses to clients as OpenAI's objects: whole answers and pieces (chunks) of a stream."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tightfit.models.text.tokenizer import Tokenizer
from tightfit.serve.http.protocol import NO_ECHO, Echo
from tightfit.serve.http.text_offsets import TextOffsets
from tightfit.serve.http.tools import found_calls
from tightfit.serve.requests.request import Answer, Output, TokenLogprob

Json = dict[str, Any]
REASONS = {"stop": "stop", "length": "length", "cancelled": "stop", None: None}


@dataclass
class Usage:
    """Tokens of a request and its answers."""

    prompt: int
    answer: int = 0
    cached: int = 0

    def add(self, output: Output) -> None:
        """Count an output. A prompt counts once, so only its first answer's cached tokens do: the other answers find
        what the first one stored."""
        self.answer += len(output.tokens)
        self.cached += output.cached if output.index == 0 else 0

    def to_json(self) -> Json:
        """OpenAI's object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answer,
            "total_tokens": self.prompt + self.answer,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True)
class Writer:
    """Writes the answers to one request."""

    model: str
    tokenizer: Tokenizer
    chat: bool
    reads_calls: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(
        self, answers: Sequence[Answer], usage: Usage, echo: Callable[[int], Echo] = lambda index: NO_ECHO
    ) -> Json:
        """The response with all answers, each after its echoed prompt."""
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [self._choice(index, answer, echo(index)) for index, answer in enumerate(answers)]
        return self._head(kind) | {"choices": choices, "usage": usage.to_json()}

    def opening(self, index: int, before: Echo = NO_ECHO) -> Json:
        """The first piece of a stream: of a chat with the role, of a completion with the echoed prompt."""
        added: Json = {"delta": {"role": "assistant", "content": ""}} if self.chat else {"text": before.text}
        return self._piece(index, added, self._echoed_logprobs(before), None)

    def offsets(self, before: Echo = NO_ECHO) -> TextOffsets:
        """The text offsets of one streamed answer's tokens, for `piece`."""
        return TextOffsets(self.tokenizer, len(before.text))

    def piece(self, index: int, output: Output, offsets: TextOffsets) -> Json:
        """The piece with what one step added."""
        added = {"delta": {"content": output.text}} if self.chat else {"text": output.text}
        return self._piece(index, added, self._logprobs(output.logprobs, offsets), REASONS[output.finish])

    def text(self, index: int, text: str) -> Json:
        """A piece of a chat's answer that may have tool calls."""
        return self._piece(index, {"delta": {"content": text}}, None, None)

    def calls(self, index: int, answer: Answer, calls: Sequence[Json]) -> list[Json]:
        """The last pieces of an answer: its tool calls, then why it ended, with all its log probabilities."""
        pieces = [
            self._piece(index, {"delta": {"tool_calls": [{"index": place, **call}]}}, None, None)
            for place, call in enumerate(calls)
        ]
        finish = "tool_calls" if calls else REASONS[answer.finish]
        return [*pieces, self._piece(index, {"delta": {}}, self._logprobs(answer.logprobs, self.offsets()), finish)]

    def ending(self, usage: Usage) -> Json:
        """The last piece of a stream that ends with its usage."""
        return self._head(self._stream_kind) | {"choices": [], "usage": usage.to_json()}

    @property
    def _stream_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> Json:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _piece(self, index: int, added: Json, logprobs: Json | None, finish: str | None) -> Json:
        choice = {"index": index, **added, "logprobs": logprobs, "finish_reason": finish}
        return self._head(self._stream_kind) | {"choices": [choice]}

    def _choice(self, index: int, answer: Answer, before: Echo) -> Json:
        logprobs, finish = self._logprobs(answer.logprobs, self.offsets(before)), REASONS[answer.finish]
        if not self.chat:
            told = _joined(self._echoed_logprobs(before), logprobs)
            return {"index": index, "logprobs": told, "text": before.text + answer.text, "finish_reason": finish}
        common: Json = {"index": index, "logprobs": logprobs}
        message: Json = {"role": "assistant", "content": answer.text}
        if self.reads_calls:
            text, calls = found_calls(answer.text)
            if calls:
                message, finish = {"role": "assistant", "content": text or None, "tool_calls": calls}, "tool_calls"
        return common | {"message": message, "finish_reason": finish}

    def _logprobs(self, logprobs: Sequence[TokenLogprob], offsets: TextOffsets) -> Json | None:
        if not logprobs:
            return None
        if not self.chat:
            return {
                "tokens": [self._name(each.token) for each in logprobs],
                "token_logprobs": [each.logprob for each in logprobs],
                "top_logprobs": [{self._name(token): p for token, p in each.top} for each in logprobs],
                "text_offset": offsets.of(each.token for each in logprobs),
            }
        return {
            "content": [
                self._named(each.token, each.logprob)
                | {"top_logprobs": [self._named(token, logprob) for token, logprob in each.top]}
                for each in logprobs
            ]
        }

    def _echoed_logprobs(self, before: Echo) -> Json | None:
        """Log probabilities of an echoed prompt's tokens; the first has none."""
        if not before.tokens:
            return None
        first, offsets = before.tokens[0], TextOffsets(self.tokenizer)
        unknown: Json = {"tokens": [self._name(first)], "token_logprobs": [None], "top_logprobs": [None]}
        return _joined(unknown | {"text_offset": offsets.of([first])}, self._logprobs(before.logprobs, offsets))

    def _named(self, token: int, logprob: float) -> Json:
        text = self.tokenizer.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(self.tokenizer.token_bytes(token))}

    def _name(self, token: int) -> str:
        """A token's text, or its bytes where these are no whole characters: decoded, many tokens would look alike."""
        own = self.tokenizer.token_bytes(token)
        try:
            return own.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def _joined(one: Json | None, other: Json | None) -> Json | None:
    """Log probabilities of two parts of a completion, one after the other."""
    if one is None or other is None:
        return one or other
    return {name: one[name] + other[name] for name in one}


def error_body(message: str, kind: str = "invalid_request_error", code: str | None = None) -> Json:
    """OpenAI's error object; characters that UTF-8 cannot encode, which a client may have sent, are replaced."""
    mended = message.encode("utf-8", "replace").decode()
    return {"error": {"message": mended, "type": kind, "param": None, "code": code}}
