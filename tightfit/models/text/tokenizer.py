"""Tokenizer: text to token ids and back, chats through the model's own template, and training a new one.

It wraps transformers' `PreTrainedTokenizerFast`, so every other tool reads what it saves. Two things are different from
transformers. Text from users is only ever text: `<|im_end|>` in a document is not the token of that name unless the
caller says `parse_special=True`. And no class picked by `model_type` rebuilds the tokenizer: a `tokenizer.json` is
taken as it stands (transformers 5.22 loads any tokenizer beside a Qwen-2 config with Qwen's normaliser).

The assistant's tokens in a chat are found in the rendered text, not guessed from token patterns: see `chat_spans.py`.
Not for tokenizers that exist only as Python code: nothing from a model's directory is ever executed.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.errors import UserError
from tightfit.models.text.chat_spans import Span, answer_spans, has_generation_marks, token_mask
from tightfit.models.text.template_limits import limited
from tightfit.models.text.tokenizer_file import check_tokenizer_files

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]
"""`{"role": "user", "content": "…"}`; a template may read further keys."""

CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MIN_VOCAB_SIZE = 256 + 3
"""Every byte, and the three special tokens of a tokenizer we train."""
LONGEST_TRAINED_TOKEN = 1024
"""Merges of one long run would make tokens that neither our own bounds nor those on GGUF files let in again."""
REPLACED = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How vocabularies of SentencePiece name a byte."""
TAKEN = ("self", "messages")
"""Names that a user's template settings may not take."""
LONG_TEXT = 10_000
"""Characters from which on a text is encoded as a batch of one: only then does the library release the GIL."""


class Tokenizer:
    """Text ⇄ token ids. Special tokens are never added, and parsed from text only on request."""

    def __init__(self, wrapped: "PreTrainedTokenizerFast") -> None:
        self._wrapped = wrapped

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple["PreTrainedTokenizerFast"]]:
        # Pickling the cached copies below would lose how each treats special tokens.
        return type(self), (self._wrapped,)

    @cached_property
    def vocab_size(self) -> int:
        """How many rows an embedding needs: the highest id, added tokens included, plus one."""
        return 1 + max(self._wrapped.get_vocab().values(), default=-1)

    @cached_property
    def longest_token(self) -> int:
        """The most characters of a text that one token can stand for."""
        return max(map(len, self._wrapped.get_vocab()), default=1)

    @property
    def eos_id(self) -> int | None:
        """The token that ends a document."""
        return self._wrapped.eos_token_id

    @property
    def bos_id(self) -> int | None:
        """The token that begins a document, where the model has one."""
        return self._wrapped.bos_token_id

    @property
    def pad_id(self) -> int | None:
        """The padding token, where the model has one."""
        return self._wrapped.pad_token_id

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """The control tokens by id."""
        added = self._wrapped.backend_tokenizer.get_added_tokens_decoder()
        return {index: token.content for index, token in sorted(added.items()) if token.special}

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The tokens after which an answer is over: end of text, and what the chat template closes an answer with."""
        ends = set() if self.eos_id is None else {self.eos_id}
        try:
            ids, mask = self.encode_chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        except UserError:
            return frozenset(ends)
        answer = [token for token, answered in zip(ids, mask, strict=True) if answered]
        return frozenset(ends | ({answer[-1]} & self.special_tokens.keys() if answer else set()))

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of a conversation, or None."""
        template = self._wrapped.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @property
    def adds_bos(self) -> bool:
        """Whether the model was trained with `bos_id` before every text. We leave adding it to the caller."""
        return self.bos_id is not None and self._wrapped.encode("a")[0] == self.bos_id

    def to_json(self) -> str:
        """The content of tokenizer.json."""
        return self._wrapped.backend_tokenizer.to_str()

    @cached_property
    def fingerprint(self) -> str:
        """A digest, equal for tokenizers that give the same ids: a key for caches of tokenized data."""
        parts = [self.to_json(), self.chat_template, [self.eos_id, self.bos_id, self.pad_id]]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of `text`. Lone surrogates, which are not text, become U+FFFD."""
        return list(self._encoding(text, parse_special).ids)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts at once, on all cores."""
        with _panics_as_user_errors():
            try:
                found = self._plain.encode_batch_fast(texts, add_special_tokens=False)
            except TypeError:
                found = self._plain.encode_batch_fast([_mended(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 (half a character) show as U+FFFD."""
        with _panics_as_user_errors():
            return self._plain.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text, which may be part of a character."""
        text = self.decode([token])
        name = self._plain.id_to_token(token) if REPLACED in text else None
        if name is None:
            return text.encode()
        if found := BYTE_TOKEN.fullmatch(name):
            return bytes([int(found[1], 16)])
        known = _bytes_by_character()
        return bytes(known[each] for each in name) if all(each in known for each in name) else text.encode()

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as one text; with `add_generation_prompt` up to where the assistant's answer begins.

        `tools` are functions the model may call, in OpenAI's format, `settings` further variables of the template
        (enable_thinking, …); templates that know none ignore them.
        """
        return self._render(messages, add_generation_prompt, tools, settings)[0]

    def encode_chat(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Token ids of the whole conversation, and for each whether the assistant says it.

        An answer is its text and the token that ends the turn, without the header before it.
        """
        with limited(sum(len(str(message.get("content"))) for message in messages if isinstance(message, dict))):
            text, marked = self._render(messages, False)
            spans = marked if has_generation_marks(self.chat_template or "") else self._answer_spans(messages, text)
        encoding = self._encoding(text, True)
        return list(encoding.ids), token_mask(encoding.offsets, spans, len(text))

    def save(self, directory: str | Path) -> None:
        """Write it the Hugging Face way: tokenizer.json, tokenizer_config.json and chat_template.jinja."""
        with _as_os_error(directory):
            self._wrapped.save_pretrained(directory)
        path = Path(directory) / "tokenizer_config.json"
        config = json.loads(path.read_text("utf-8"))
        # transformers 5 writes a class name that transformers 4, still inside many servers, does not know.
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")

    @cached_property
    def _plain(self) -> "tokenizers.Tokenizer":
        return self._bare(parse_special=False)

    @cached_property
    def _parsing(self) -> "tokenizers.Tokenizer":
        return self._bare(parse_special=True)

    def _bare(self, *, parse_special: bool) -> "tokenizers.Tokenizer":
        """A copy that adds and cuts nothing and reports untrimmed offsets; one per mode, so threads never toggle it."""
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(self.to_json())
        backend.post_processor = None
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = not parse_special
        return backend

    def _encoding(self, text: str, parse_special: bool) -> "tokenizers.Encoding":
        with _panics_as_user_errors():
            backend = self._parsing if parse_special else self._plain
            try:
                return _encoded(backend, text)
            except TypeError:
                return _encoded(backend, _mended(text))

    def _answer_spans(self, messages: Sequence[Message], text: str) -> list[Span]:
        return answer_spans(messages, text, self.render_chat, frozenset(self.special_tokens.values()))

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """The rendered conversation and what `{% generation %}` marks in it, if the template has such marks."""
        from tightfit.models.text.chat_template import chat_template

        template = self.chat_template
        if template is None:
            raise UserError("the tokenizer has no chat template, so it cannot lay out a conversation; use plain text")
        own = {**self._wrapped.special_tokens_map, "add_generation_prompt": add_generation_prompt, "tools": tools}
        values = {name: value for name, value in (settings or {}).items() if name not in TAKEN} | own
        return chat_template(template).render(_checked(messages), **values)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer whose files lie in `directory`."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory; give one that holds tokenizer.json")
    check_tokenizer_files(directory)
    found = (directory / "tokenizer.json").is_file()
    try:
        reader: Any = PreTrainedTokenizerFast if found else AutoTokenizer
        wrapped = reader.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        tokenizer = Tokenizer(wrapped)
        tokenizer.encode("Aé 1")
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the Rust side panics on some broken files, and a panic is no Exception
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        problem = "cannot be read" if found else "has no tokenizer.json, and its other files make no tokenizer"
        raise UserError(f"the tokenizer in {directory} {problem}: {why}") from error
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int, progress: bool = False) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` tokens (fewer when `texts` has no more pairs to merge).

    Digits stand alone (numbers then have one spelling), nothing is normalised, and every byte has a token, so any text
    comes back as it was. The template is plain ChatML.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(f"vocabulary size is {vocab_size}; bytes and special tokens alone need {MIN_VOCAB_SIZE}")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = digits_apart()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=LONGEST_TRAINED_TOKEN,
        show_progress=progress,
    )
    backend.train_from_iterator((_mended(text) for text in texts), trainer)
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT, chat_template=CHATML_TEMPLATE)
    )


def digits_apart() -> "tokenizers.pre_tokenizers.PreTokenizer":
    """GPT-2's words with every digit on its own: what SmolLM, StarCoder and our own tokenizers split by."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


@contextmanager
def _panics_as_user_errors() -> Iterator[None]:
    """Turn failures of the Rust library (an expression that gives up, a token that is not there) into a UserError."""
    try:
        yield
    except (TypeError, UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is no Exception
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"the tokenizer fails on a text ({why}); its tokenizer.json may be damaged") from error


@cache
def _bytes_by_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable Latin-1 itself, others from 256."""
    shown = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) not in " \xad"]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def _encoded(backend: "tokenizers.Tokenizer", text: str) -> "tokenizers.Encoding":
    if len(text) < LONG_TEXT:
        return backend.encode(text, add_special_tokens=False)
    return backend.encode_batch([text], add_special_tokens=False)[0]


def _mended(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced; anything else comes back as it is."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _checked(messages: Sequence[Message]) -> list[Message]:
    """The conversation with its texts mended; refused where a message has no role or no text."""
    if not messages:
        raise UserError("the conversation is empty; give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"message {index} of the conversation is {message!r:.80}; it needs a role and a content")
        if not isinstance(message.get("content"), str):
            raise UserError(f"message {index} of the conversation has content {message.get('content')!r:.80}, not text")
    return [{**message, "content": _mended(message["content"])} for message in messages]


@contextmanager
def _as_os_error(place: str | Path) -> Iterator[None]:
    """`tokenizers` raises a bare Exception where a file cannot be written; raise the OSError that its text names."""
    try:
        yield
    except Exception as error:
        found = re.search(r"\(os error (\d+)\)", str(error)) if type(error) is Exception else None
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(place)) from error
