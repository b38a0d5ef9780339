"""A conversation with a model in this process: turn by turn, in the model's own chat template."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from tightfit.errors import UserError
from tightfit.models.loading import LoadedModel
from tightfit.models.text.tokenizer import Message
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.streams import token_streams


@dataclass
class Chat:
    """The messages so far; `ask` adds a question and its answer once the answer has been read to its end."""

    loaded: LoadedModel
    sampling: Sampling
    messages: list[Message] = field(default_factory=list)

    @classmethod
    def begun(cls, loaded: LoadedModel, sampling: Sampling, system: str | None = None) -> "Chat":
        """A new conversation, after the `system` prompt where there is one."""
        return cls(loaded, sampling, [] if system is None else [{"role": "system", "content": system}])

    def ask(self, question: str) -> Iterator[str]:
        """The answer to `question`, piece by piece; a question without a complete answer is not kept in `messages`."""
        if not question.strip():
            raise UserError("the message is empty; give some text with -p")
        messages: list[Message] = [*self.messages, {"role": "user", "content": question}]
        tokenizer = self.loaded.tokenizer
        if tokenizer is None:
            raise UserError(f"{self.loaded.source} has no tokenizer, so it cannot answer")
        rendered = tokenizer.render_chat(messages, add_generation_prompt=True)
        (stream,) = token_streams(self.loaded, tokenizer.encode(rendered, parse_special=True), self.sampling)
        return self._remembered(stream, messages)

    def _remembered(self, stream: Iterator[str], messages: list[Message]) -> Iterator[str]:
        pieces = []
        for piece in stream:
            pieces.append(piece)
            yield piece
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        self.sampling = replace(self.sampling, seed=(self.sampling.seed + 1) % 2**62)


def converse(chat: Chat, read: Callable[[], str], show: Callable[[Iterator[str]], None]) -> None:
    """Ask what `read` gives and `show` the answers, until it raises EOFError."""
    while True:
        try:
            question = read()
        except EOFError:
            return
        if question.strip():
            show(chat.ask(question))
