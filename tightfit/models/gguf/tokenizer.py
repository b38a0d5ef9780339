"""The tokenizer inside a GGUF file's metadata, and a `Tokenizer` as such metadata.

GGUF keeps tokens, merges and the *name* of a pre-tokenizer whose rules live in llama.cpp's source; the rules we know
are the rows of `SPLITTERS`, each compared with llama.cpp id by id in the tests. Byte-level BPE (`gpt2`) goes both ways;
SentencePiece BPE (`llama`: Mistral, Gemma, Phi-3) is read, its merges rebuilt from the scores. Where llama.cpp and the
model's own tokenizer differ we follow the model: Qwen-2 normalises to NFC.
"""

import json
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.errors import UserError
from tightfit.models.text.tokenizer import Tokenizer, digits_apart

if TYPE_CHECKING:
    import tokenizers

LONGEST_TOKEN = 1024
"""Characters; the longest of published vocabularies are runs of some 250 spaces."""
MOST_CHARACTERS = 2**24
"""The most in a whole vocabulary, and in the tokens of all its merges; one of 260 000 tokens has 2 and 5 million."""
MOST_MERGES = 10**6
"""Gemma's 256 000 tokens can be made in 580 000 ways."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Token types."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2_PATTERN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"


@dataclass(frozen=True)
class Splitter:
    """How text is cut before merging: a pre-tokenizer, its GGUF names (the first is written), and its options."""

    names: tuple[str, ...]
    make: "Callable[[], tokenizers.pre_tokenizers.PreTokenizer]"
    whole_words: bool = False
    """A word that is a token is taken as it is, whatever the merges say."""
    nfc: bool = False


def _gpt2() -> "tokenizers.pre_tokenizers.PreTokenizer":
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=False)


def _by(pattern: str) -> "Callable[[], tokenizers.pre_tokenizers.PreTokenizer]":
    def make() -> "tokenizers.pre_tokenizers.PreTokenizer":
        from tokenizers import Regex
        from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

        return Sequence([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


SPLITTERS = (
    Splitter(("smollm", "starcoder", "refact"), digits_apart),
    Splitter(("gpt-2",), _gpt2),
    Splitter(("llama-bpe", "llama3", "llama-v3"), _by(LLAMA3_PATTERN), whole_words=True),
    Splitter(("dbrx",), _by(LLAMA3_PATTERN)),
    Splitter(("qwen2",), _by(QWEN2_PATTERN), nfc=True),
)

BEGINNING = SPLITTERS[2].names
"""Byte-level tokenizers whose texts begin with the BOS token unless the file says otherwise."""


@dataclass(frozen=True)
class _Vocabulary:
    """The lists of the metadata, checked to be lists of one length."""

    tokens: list[str]
    kinds: list[int]

    def of(self, *kinds: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]


def read_tokenizer(metadata: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer that the metadata of the GGUF file `path` describes."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = _vocabulary(metadata, path)
    model = metadata.get("tokenizer.ggml.model")
    readers = {"gpt2": _byte_level, "llama": _sentence_piece}
    if not isinstance(model, str) or model not in readers:
        raise UserError(f"{path} has a tokenizer of the kind {reprlib.repr(model)}; supported are {', '.join(readers)}")
    named = {f"{name}_token": _token(metadata, key, vocabulary, path) for name, key in _NAMED.items()}
    try:
        backend = readers[model](metadata, vocabulary, path)
        _add_special(backend, vocabulary)
        _add_first(backend, metadata, named["bos_token"])
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the tokenizers library raises bare Exceptions, and panics, which are none
        raise UserError(f"the tokenizer in {path} cannot be built: {error}") from error
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend,
            chat_template=template if isinstance(template, str) else None,
            **{name: token for name, token in named.items() if token is not None},
        )
    )


_NAMED = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}


def _vocabulary(metadata: dict[str, Any], path: Path) -> _Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not _is_list(tokens, str) or not tokens:
        raise UserError(f"{path} has no list of tokens in its metadata, so no tokenizer can be made from it")
    longest, characters = max(map(len, tokens)), sum(map(len, tokens))
    if longest > LONGEST_TOKEN or characters > MOST_CHARACTERS:
        raise UserError(
            f"{path} has a vocabulary of {characters:,} characters with a token of {longest:,}; the most are "
            f"{MOST_CHARACTERS:,} and {LONGEST_TOKEN:,}: get the file again"
        )
    kinds = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not _is_list(kinds, int) or len(kinds) != len(tokens):
        raise UserError(f"{path} is damaged: its token types do not match its {len(tokens)} tokens")
    return _Vocabulary(tokens, kinds)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _token(metadata: dict[str, Any], key: str, vocabulary: _Vocabulary, path: Path) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{key}")
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(vocabulary.tokens):
        raise UserError(f"{path} is damaged: its {key} is {reprlib.repr(index)}, with {len(vocabulary.tokens)} tokens")
    return vocabulary.tokens[index]


def _add_special(backend: "tokenizers.Tokenizer", vocabulary: _Vocabulary) -> None:
    from tokenizers import AddedToken

    control = vocabulary.of(CONTROL, UNKNOWN)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False) for token in vocabulary.of(USER_DEFINED)])


def _add_first(backend: "tokenizers.Tokenizer", metadata: dict[str, Any], first: str | None) -> None:
    """Have texts begin with the BOS token `first` if the file says so, or says nothing and its kind usually does."""
    from tokenizers.processors import TemplateProcessing

    usual = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in BEGINNING
    if first is not None and metadata.get("tokenizer.ggml.add_bos_token", usual):
        special = [(first, backend.token_to_id(first))]
        backend.post_processor = TemplateProcessing(single=[first, "$A"], special_tokens=special)


def _byte_level(metadata: dict[str, Any], vocabulary: _Vocabulary, path: Path) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    name = metadata.get("tokenizer.ggml.pre")
    splitter = next((row for row in SPLITTERS if name in row.names), None)
    if splitter is None:
        known = ", ".join(known for row in SPLITTERS for known in row.names)
        raise UserError(
            f"{path} cuts text by the rules {reprlib.repr(name)}, which tightfit does not know; it knows {known}"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not _is_list(merges, str) or len(merges) > MOST_MERGES:
        raise UserError(f"{path} has no list of merges in its metadata, so no tokenizer can be made from it")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise UserError(f"{path} is damaged: a merge in its metadata is not a pair of tokens")
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    backend = Backend(models.BPE(vocab=ids, merges=pairs, ignore_merges=splitter.whole_words))
    backend.pre_tokenizer = splitter.make()
    backend.decoder = decoders.ByteLevel()
    if splitter.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentence_piece(metadata: dict[str, Any], vocabulary: _Vocabulary, path: Path) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or not _is_list(scores, float) or len(scores) != len(vocabulary.tokens):
        raise UserError(f"{path} is damaged: its token scores do not match its {len(vocabulary.tokens)} tokens")
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.of(UNKNOWN)
    backend = Backend(
        models.BPE(
            vocab=ids,
            merges=_merges(vocabulary, scores, path),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=unknown[0] if unknown else None,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        pieces.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(pieces)
    return backend


def _merges(vocabulary: _Vocabulary, scores: list[float], path: Path) -> list[tuple[str, str]]:
    """Every way to make a token from two others, best token first: what SentencePiece's search does, as merges."""
    rows = zip(vocabulary.tokens, vocabulary.kinds, scores, strict=True)
    ranked = {token: score for token, kind, score in rows if kind == NORMAL}
    found: list[tuple[float, str, str]] = []
    characters = 0
    for token, score in ranked.items():
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        ways = [(-score, left, right) for left, right in halves if left in ranked and right in ranked]
        found += ways
        characters += len(ways) * len(token)
        if len(found) > MOST_MERGES or characters > MOST_CHARACTERS:
            raise UserError(
                f"{path} has tokens that can be made from others in too many ways ({len(found):,}), which no tokenizer "
                "has; get the file again"
            )
    found.sort(key=lambda row: row[0])
    return [(left, right) for _, left, right in found]


def tokenizer_metadata(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """`tokenizer` as GGUF metadata, filled up with unused tokens to the `rows` of the embedding."""
    content = json.loads(tokenizer.to_json())
    model, names = content["model"], {index: token for token, index in _ids(content).items()}
    if tokenizer.vocab_size > rows:
        raise UserError(f"the tokenizer has {tokenizer.vocab_size} tokens and the model's embedding only {rows} rows")
    special = {entry["id"]: CONTROL if entry["special"] else USER_DEFINED for entry in content["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    named = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "padding_token_id": tokenizer.pad_id}
    if tokenizer.bos_id is None:
        # llama.cpp otherwise takes GPT-2's token 11, whatever that is here.
        named["bos_token_id"] = tokenizer.eos_id
    fields = {
        "model": "gpt2",
        "pre": _splitter_of(content).names[0],
        "tokens": [names.get(index, f"[PAD{index}]") for index in range(rows)],
        "token_type": [special.get(index, NORMAL if index in names else UNUSED) for index in range(rows)],
        "merges": merges,
        "add_bos_token": tokenizer.adds_bos,
        **{key: index for key, index in named.items() if index is not None},
    }
    template = {} if tokenizer.chat_template is None else {"tokenizer.chat_template": tokenizer.chat_template}
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()} | template


def _ids(content: dict[str, Any]) -> dict[str, int]:
    vocab = content["model"]["vocab"]
    if content["model"].get("type") != "BPE" or content["model"].get("byte_fallback") or not isinstance(vocab, dict):
        raise UserError("only byte-level BPE tokenizers can be written to GGUF, and this one is of another kind")
    return vocab | {entry["content"]: entry["id"] for entry in content["added_tokens"]}


def _splitter_of(content: dict[str, Any]) -> Splitter:
    """The row of SPLITTERS that cuts text as this tokenizer.json does."""
    whole_words, normalizer = bool(content["model"].get("ignore_merges")), content["normalizer"]
    for row in SPLITTERS:
        same = _rules(content["pre_tokenizer"]) == _rules(json.loads(row.make().__getstate__()))
        if same and whole_words == row.whole_words and (normalizer or {}).get("type") == ("NFC" if row.nfc else None):
            return row
    raise UserError("the tokenizer cuts text by rules that GGUF has no name for, so it cannot be written to one")


def _rules(node: Any) -> Any:
    """A pre-tokenizer's JSON without what only concerns offsets."""
    if isinstance(node, dict):
        return {key: _rules(value) for key, value in node.items() if key != "trim_offsets"}
    return [_rules(item) for item in node] if isinstance(node, list) else node
