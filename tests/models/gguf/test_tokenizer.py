"""Tokenizers in GGUF metadata: the ids of llama.cpp, for every way of cutting text that we know, and back."""

from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.models.gguf.conversion import convert
from tests.models.gguf.llama_cpp import llama_cpp
from tests.models.test_tokenizer import AWKWARD, CORPUS
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.gguf.file import GgufFile
from tightfit.models.gguf.model import load_gguf_tokenizer, write_gguf
from tightfit.models.gguf.tokenizer import SPLITTERS, Splitter, read_tokenizer, tokenizer_metadata
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import CHATML_TEMPLATE, Tokenizer, load_tokenizer, train_tokenizer

SPACES = ["a  b   c", " x\n\n\n y \n", "\t\tif x:\r\n\r\n  z", "end  ", "a\u00a0b\u2003c", "\u3000全角\u3000"]
WORDS = [
    "I'LL we'Re DON'T 'sup l'été",
    "camelCase XMLHttp v2.0.1",
    "१२३ 12345678 ½ Ⅷ",
    "http://a.b/c?d=1&e#f",
    "x=y+=z!=w;",
]
TEXTS = [*AWKWARD, *SPACES, *WORDS]
NOT_NFC = [text for text in TEXTS if normalizers.NFC().normalize_str(text) != text]


def spec(vocab_size: int) -> ModelSpec:
    return ModelSpec(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=32,
        layers=1,
        heads=2,
        kv_heads=2,
        head_dim=16,
        mlp_size=32,
        max_positions=64,
        tied=True,
    )


def trained(splitter: Splitter) -> Tokenizer:
    """A tokenizer of some merges that cuts text by `splitter`."""
    backend = Backend(models.BPE(ignore_merges=splitter.whole_words))
    backend.pre_tokenizer, backend.decoder = splitter.make(), decoders.ByteLevel()
    backend.normalizer = normalizers.NFC() if splitter.nfc else None
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS + TEXTS * 2, trainer)
    backend.add_tokens(["<think>"])
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", chat_template=CHATML_TEMPLATE)
    )


@pytest.mark.parametrize("splitter", SPLITTERS, ids=lambda splitter: splitter.names[0])
def test_ids_are_those_of_llama_cpp(splitter: Splitter, tmp_path: Path) -> None:
    ours, path = trained(splitter), tmp_path / "a.gguf"
    write_gguf(Decoder(spec(ours.vocab_size)), ours, path, "fp32")
    read = load_gguf_tokenizer(GgufFile(path))
    assert read is not None
    with llama_cpp(path) as reference:
        for text in [text for text in TEXTS if not (splitter.nfc and text in NOT_NFC)]:
            assert read.encode(text) == ours.encode(text) == reference.tokenize(text), repr(text)
            parsed = f"<|im_start|>{text}<|im_end|>\n<think>{text}"
            assert read.encode(parsed, parse_special=True) == reference.tokenize(parsed, parse_special=True), parsed
    assert (read.eos_id, read.chat_template, read.vocab_size) == (ours.eos_id, ours.chat_template, ours.vocab_size)


def sentence_piece(prefix: bool) -> tuple[list[str], list[float], list[int]]:
    """A vocabulary as SentencePiece makes them: bytes, characters, and pieces with scores."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if prefix else "never")
    texts = [text for text in CORPUS + TEXTS[:4] if text]
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    pieces = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *(piece for piece, _ in pieces),
        "[TOOL]",
    ]
    scores = [0.0] * 259 + [-float(index) for index in range(len(pieces))] + [-1000.0]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4]
    return tokens, scores, kinds


@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "plain"])
def test_sentence_piece_ids_are_those_of_llama_cpp(prefix: bool, tmp_path: Path) -> None:
    tokens, scores, kinds = sentence_piece(prefix)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        writer.add_add_space_prefix(prefix)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    shape, path = spec(len(tokens)), tmp_path / "a.gguf"
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    convert(LlamaForCausalLM(config), shape, path, vocabulary=add)
    read = load_gguf_tokenizer(GgufFile(path))
    assert read is not None
    with llama_cpp(path) as reference:
        for text in TEXTS:
            assert read.encode(text) == reference.tokenize(text), repr(text)
            assert read.decode(read.encode(text)) == text
            parsed = f"<s>{text}</s>[TOOL]x"
            assert read.encode(parsed, parse_special=True) == reference.tokenize(parsed, parse_special=True), parsed


def test_what_is_written_reads_the_same() -> None:
    ours = train_tokenizer(CORPUS, 300)
    metadata = tokenizer_metadata(ours, 320)
    assert metadata["tokenizer.ggml.tokens"][-1] == "[PAD319]"
    read = read_tokenizer(metadata, Path("a.gguf"))
    assert read.encode_many(TEXTS) == ours.encode_many(TEXTS)
    assert read.special_tokens == ours.special_tokens
    with pytest.raises(UserError, match="300 tokens and the model's embedding only 299 rows"):
        tokenizer_metadata(ours, 299)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, False),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"add_bos_token": True}, True),
        ({"model": "llama", "scores": [0.0] * 4}, True),
        ({"add_bos_token": True, "bos_token_id": None}, False),
    ],
)
def test_whether_texts_begin_with_a_token_is_known(change: dict, expected: bool, tmp_path: Path) -> None:
    good = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab", "<s>"], "token_type": [1, 1, 1, 3]}
    changed = good | {"merges": ["a b"], "bos_token_id": 3} | change
    metadata = {f"tokenizer.ggml.{key}": value for key, value in changed.items() if value is not None}
    read = read_tokenizer(metadata, Path("a.gguf"))
    read.save(tmp_path)
    assert read.adds_bos == load_tokenizer(tmp_path).adds_bos == expected
    assert 3 not in read.encode("ab")
    if changed["model"] == "gpt2" and changed["bos_token_id"] is not None:
        assert tokenizer_metadata(read, 4)["tokenizer.ggml.add_bos_token"] == expected


def test_a_tokenizer_without_a_name_in_gguf_is_refused() -> None:
    for pre in (pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=True)):
        backend = Backend(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
        backend.pre_tokenizer = pre
        with pytest.raises(UserError, match="rules that GGUF has no name for"):
            tokenizer_metadata(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend)), 3)
    words = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(UserError, match="only byte-level BPE"):
        tokenizer_metadata(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=words)), 1)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model": "bert"}, "of the kind 'bert'"),
        ({"pre": "tekken"}, "by the rules 'tekken'"),
        ({"pre": None}, "by the rules None"),
        ({"tokens": None}, "no list of tokens"),
        ({"tokens": [1, 2]}, "no list of tokens"),
        ({"merges": None}, "no list of merges"),
        ({"merges": ["ab"]}, "not a pair"),
        ({"merges": ["x y"]}, "cannot be built"),
        ({"token_type": [1]}, "token types do not match"),
        ({"eos_token_id": 3}, "eos_token_id is 3"),
        ({"model": "llama"}, "scores do not match"),
    ],
)
def test_bad_metadata_is_refused(change: dict, expected: str) -> None:
    good = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "token_type": [1, 1, 1], "merges": ["a b"]}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in (good | change).items() if value is not None}
    with pytest.raises(UserError, match=expected):
        read_tokenizer(metadata, Path("a.gguf"))
