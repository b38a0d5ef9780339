"""Conversations to learn answers from, read from the usual published formats into one: messages with roles.

The format is recognised row by row, by the fields that are present and not null, so files of different origin can be
mixed: OpenAI `messages`, ShareGPT `conversations`, Alpaca `instruction`/`input`/`output`, and the pairs
`prompt`/`completion`, `prompt`/`response` and `question`/`answer`. A row without an answer is an error, as it is nearly
always a mistake in making the file.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tightfit.errors import UserError
from tightfit.train.data.rows import CONVERSATIONS, Row, missing_fields, read_rows
from tightfit.train.data.source_files import text_value
from tightfit.train.data.sources import Source

Message = dict[str, str]
ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MOST_CHARACTERS = 2**21
"""The most characters of a conversation, which is tokenized as a whole: some 0.5 GiB of host memory at worst. No
training row holds as much."""
MOST_MESSAGES = 2_000
SHAREGPT_ROLES = ROLES | {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Chat:
    """Messages of `role` and `content`, their place in the source, and their share of its bytes (for progress)."""

    messages: list[Message]
    where: str
    source_bytes: float


def read_chats(sources: Sequence[Source]) -> Iterator[Chat]:
    """The conversations of `sources` in order."""
    for source in sources:
        for row in read_rows(source, FIELDS):
            yield Chat(messages_of(row), row.where, row.source_bytes)


def messages_of(row: Row) -> list[Message]:
    """The conversation of `row` in any known format; one without an answer is refused."""
    given = {name: value for name, value in row.fields.items() if value is not None}
    for needed, read in SHAPES:
        if all(name in given for name in needed):
            messages = read(given, row.where)
            break
    else:
        raise missing_fields(row.where, [" + ".join(needed) for needed, _ in SHAPES], list(given))
    characters = sum(len(message["content"]) for message in messages)
    if characters > MOST_CHARACTERS or len(messages) > MOST_MESSAGES:
        raise UserError(
            f"{row.where} is a conversation of {len(messages):,} messages and {characters:,} characters; the most are "
            f"{MOST_MESSAGES:,} and {MOST_CHARACTERS:,}: shorten or remove it"
        )
    if not any(message["role"] == "assistant" and message["content"].strip() for message in messages):
        raise UserError(f"{row.where} has no answer of the assistant to learn from; add one or remove the row")
    return messages


def _listed(field: str, role_key: str, text_key: str, roles: Mapping[str, str]) -> Callable[..., list[Message]]:
    """Reader of a list of messages under `field`."""

    def read(fields: Mapping[str, Any], where: str) -> list[Message]:
        turns = fields[field]
        if not isinstance(turns, list):
            raise UserError(f"{where} has {type(turns).__name__} in field {field!r}; it must be a list of messages")
        return [turn(value, f"message {number} of {where}") for number, value in enumerate(turns, start=1)]

    def turn(value: Any, where: str) -> Message:
        if not isinstance(value, dict) or role_key not in value or text_key not in value:
            raise UserError(f"{where} is not an object with {role_key!r} and {text_key!r}; correct or remove it")
        role = value[role_key]
        if not isinstance(role, str) or role not in roles:
            raise UserError(f"{where} has the {role_key} {role!r}; known are {', '.join(roles)}")
        return {"role": roles[role], "content": text_value(value[text_key], text_key, where)}

    return read


def _pair(question: str, answer: str) -> Callable[..., list[Message]]:
    """Reader of one question and one answer."""

    def read(fields: Mapping[str, Any], where: str) -> list[Message]:
        asked, answered = (text_value(fields[name], name, where) for name in (question, answer))
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]

    return read


def _alpaca(fields: Mapping[str, Any], where: str) -> list[Message]:
    """Instruction and answer; the input, if any, is appended to the instruction."""
    messages = _pair("instruction", "output")(fields, where)
    if addition := text_value(fields.get("input", ""), "input", where):
        messages[0]["content"] += f"\n\n{addition}"
    return messages


READERS: tuple[Callable[..., list[Message]], ...] = (
    _listed("messages", "role", "content", ROLES),
    _listed("conversations", "from", "value", SHAREGPT_ROLES),
    _alpaca,
    *(_pair(*fields) for fields in CONVERSATIONS[3:]),
)
SHAPES = tuple(zip(CONVERSATIONS, READERS, strict=True))
FIELDS = tuple(dict.fromkeys([name for needed, _ in SHAPES for name in needed] + ["input"]))
