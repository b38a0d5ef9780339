"""Bodies of requests, as OpenAI defines them, and how they become `Sampling` and prompts.

Fields that OpenAI's interface lacks have the names other servers gave them (top_k, min_p, guided_regex, …). Unknown
fields are ignored, as clients send many. Values are checked where they are used, in `Sampling`. Long lists are refused
by their length or at their first mistake: pydantic writes a sentence for each, and half a million take seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from tightfit.errors import UserError
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.serve.requests.grammar import FORMS, Grammar, asked_grammar
from tightfit.serve.requests.request import MOST_ANSWERS, TokenLogprob
from tightfit.serve.requests.sampling import LARGEST_SEED, NUMBERS, Sampling

COMPLETION_TOKENS = 16
"""OpenAI's default for plain completions; chats go on until they are over."""
CONTENT = ("messages", "prompt", "input")
MOST_STOPS = 16
MOST_PROMPTS = 64
MOST_TOOLS = 1024
MOST_BIASES = 2**14


def _at_most(most: int, what: str) -> BeforeValidator:
    """Refuses a longer list or object before its items are looked at."""

    def check(given: Any) -> Any:
        if isinstance(given, list | dict) and len(given) > most:
            raise ValueError(f"there are {len(given)} {what}; give at most {most}")
        return given

    return BeforeValidator(check)


def _all_of(given: Any, kind: type, what: str) -> Any:
    """`given`; a ValueError for the first item of a list whose type is not `kind`."""
    if isinstance(given, list) and not all(type(each) is kind for each in given):  # JSON's true is no number
        place = next(index for index, each in enumerate(given) if type(each) is not kind)
        raise ValueError(f"item {place} is not {what}")
    return given


def _kind_of_texts(given: Any) -> str:
    """The kind that the first item decides for all, so that pydantic does not try each item as every kind."""
    if not isinstance(given, list):
        return "text"
    first = given[0] if given else ""
    return "token lists" if isinstance(first, list) else "texts" if isinstance(first, str) else "tokens"


def _few_and_alike(given: Any) -> Any:
    kind = _kind_of_texts(given)
    if kind in ("texts", "token lists") and len(given) > MOST_PROMPTS:
        raise ValueError(f"there are {len(given)} texts; give 1 to {MOST_PROMPTS}")
    if kind == "token lists":
        for tokens in given:
            _all_of(tokens, int, "a list of whole numbers")
    return _all_of(given, int, "a whole number") if kind == "tokens" else given


Texts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Tag("texts")]
    | Annotated[list[int], Tag("tokens")]
    | Annotated[list[list[int]], Tag("token lists")],
    Discriminator(_kind_of_texts),
    BeforeValidator(_few_and_alike),
]
"""One text or several, as they are or as tokens."""
Messages = Annotated[
    list[dict[str, Any]], Field(min_length=1), BeforeValidator(lambda given: _all_of(given, dict, "an object"))
]


class Lenient(BaseModel):
    """Ignores unknown fields. A setting that is null counts as not given, as some clients send them all; the content of
    a request (CONTENT) may not be null."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name in CONTENT}


class ResponseFormat(Lenient):
    """The form an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class StreamOptions(Lenient):
    """What a stream ends with."""

    include_usage: bool = False


class Generation(Lenient):
    """What chats and completions have in common."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float] | None, _at_most(MOST_BIASES, "biases")] = None
    seed: int | None = None
    stop: Annotated[str | list[str] | None, _at_most(MOST_STOPS, "texts")] = None
    n: int = Field(default=1, ge=1, le=MOST_ANSWERS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_regex: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_grammar: str | None = None
    ignore_eos: bool = False
    priority: int = Field(default=0, ge=-1000, le=1000)

    def sampling(
        self, tokenizer: Tokenizer, max_tokens: int, logprobs: int | None, grammar: Grammar | None = None
    ) -> Sampling:
        """The settings as `Sampling`, with `max_tokens` where the client gives none."""
        names = (*NUMBERS, "top_k", "logit_bias", "seed")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if -LARGEST_SEED - 1 <= given.get("seed", 0) < 0:
            given["seed"] += LARGEST_SEED + 1  # OpenAI's seeds have a sign
        if given.get("top_k") == -1:
            given["top_k"] = 0  # off, as clients of vLLM say it
        return Sampling(
            max_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
            stop=self._stops(),
            stop_ids=frozenset() if self.ignore_eos else tokenizer.stop_ids,
            logprobs=logprobs,
            grammar=grammar or self.grammar(),
            **given,
        )

    def grammar(self) -> Grammar | None:
        """The grammar that the answer must follow, from whichever field asks for one; None without."""
        return asked_grammar(self.model_dump(include=set(FORMS)))

    def _stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionBody(Generation):
    """/v1/completions"""

    prompt: Texts = ""
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    @property
    def is_silent(self) -> bool:
        """Whether the prompt is to be echoed and no token generated."""
        return self.echo and self.max_tokens == 0

    def refuse_undone(self) -> None:
        """Refuse settings that would change the answer and are not implemented."""
        if self.is_silent and self.stream:
            raise UserError("max_tokens is 0, which leaves a stream empty; leave stream out or ask for a token")
        if self.best_of not in (None, self.n):
            raise UserError(
                f"best_of is {self.best_of} and n is {self.n}; answers are not ranked here, leave best_of out"
            )
        if self.suffix:
            raise UserError("suffix is given, but answers do not lead up to a text here; leave it out")


class Function(Lenient):
    """A function the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None


class Tool(Lenient):
    """A tool; only functions are known."""

    type: Literal["function"] = "function"
    function: Function


class ChatBody(Generation):
    """/v1/chat/completions"""

    messages: Messages
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Annotated[list[Tool] | None, _at_most(MOST_TOOLS, "tools")] = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def asked_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report beside each token; None for no log probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise UserError(f"top_logprobs is {self.top_logprobs}, but logprobs is not true; set it or leave both out")
        return (self.top_logprobs or 0) if self.logprobs else None


class EmbeddingBody(Lenient):
    """/v1/embeddings"""

    model: str = ""
    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


def as_token_lists(given: Texts, tokenizer: Tokenizer, room: int) -> list[list[int]]:
    """The prompts of a request as tokens; a text gets the model's beginning-of-text token, where it wants one.

    Texts too long for `room` tokens are refused before tokenizing, which takes seconds a megabyte.
    """
    from tightfit.models.generate import prompt_tokens

    def tokens(text: str) -> list[int]:
        refuse_endless(text, tokenizer, room)
        return prompt_tokens(tokenizer, text, chat=False)

    if isinstance(given, str):
        return [tokens(given)]
    if given and all(isinstance(each, int) for each in given):
        return [[int(each) for each in given]]  # type: ignore[arg-type]
    return [tokens(each) if isinstance(each, str) else list(each) for each in given]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Echo:
    """A prompt that its answers begin with, and the log probabilities of its tokens after the first, where they are
    asked for."""

    text: str = ""
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()


NO_ECHO = Echo()


def echoed(given: Texts, tokenizer: Tokenizer) -> list[str]:
    """The prompts of a request as text, decoded where they were given as tokens."""
    if isinstance(given, str):
        return [_text_of(given, tokenizer)]
    alone = bool(given) and all(isinstance(each, int) for each in given)
    return [_text_of(each, tokenizer) for each in ([given] if alone else given)]


def _text_of(given: Any, tokenizer: Tokenizer) -> str:
    return given.encode("utf-8", "replace").decode() if isinstance(given, str) else tokenizer.decode(given)


def refuse_endless(text: str, tokenizer: Tokenizer, room: int) -> None:
    """Refuse a text that is longer than `room` of the longest tokens."""
    if len(text) > room * tokenizer.longest_token:
        raise UserError(f"the prompt is {len(text):,} characters long; there is room for {room} tokens, shorten it")
