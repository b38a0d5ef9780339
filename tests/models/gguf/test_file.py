"""Damaged, hostile and foreign GGUF files: a sentence, quickly, and no memory beyond the file's size."""

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.models.test_tokenizer import CORPUS
from tests.speed import within_turns
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.gguf.file import GgufFile
from tightfit.models.gguf.model import load_gguf, load_gguf_tokenizer, write_gguf
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import train_tokenizer

SPEC = ModelSpec(
    family="llama",
    vocab_size=264,
    hidden_size=32,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=16,
    mlp_size=32,
    max_positions=64,
)
COUNTS = 8
"""Where a file says how many tensors and, after that, how many metadata entries it has."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    torch.manual_seed(0)
    write_gguf(Decoder(SPEC), train_tokenizer(CORPUS, 262), path, "q8_0")
    return path.read_bytes()


def load(content: bytes, folder: Path) -> None:
    path = folder / "b.gguf"
    path.write_bytes(content)
    file = GgufFile(path)
    load_gguf(file, device="cpu", dtype=torch.float32)
    load_gguf_tokenizer(file)


def header_bytes(content: bytes, folder: Path) -> int:
    path = folder / "b.gguf"
    path.write_bytes(content)
    return min(tensor.offset for tensor in GgufFile(path).tensors.values())


def test_truncations_are_refused(good: bytes, tmp_path: Path) -> None:
    header = header_bytes(good, tmp_path)
    cuts = [*range(200), *range(200, header, 97), *range(header, len(good), 4001), len(good) - 40]
    for cut in cuts:
        with pytest.raises(UserError, match=r"damaged|is not a GGUF file"):
            load(good[:cut], tmp_path)


def test_flipped_bytes_load_or_are_refused(good: bytes, tmp_path: Path) -> None:
    header, draw = header_bytes(good, tmp_path), random.Random(0)
    loaded, refusals = 0, []
    for _ in range(250):
        content = bytearray(good)
        for _ in range(draw.choice([1, 1, 2, 5])):
            content[draw.randrange(header)] = draw.choice([0, 1, 0x7F, 0xFF, draw.randrange(256)])
        with within_turns(80):
            try:
                load(bytes(content), tmp_path)
                loaded += 1
            except UserError as error:
                refusals.append(str(error))
    assert loaded > 25
    assert len(refusals) > 25
    assert not [refusal for refusal in refusals if "\n" in refusal]


@pytest.mark.parametrize("offset", [COUNTS, COUNTS + 8])
@pytest.mark.parametrize("count", [2**31, 2**40, 2**63, 2**64 - 1])
def test_huge_counts_cost_nothing(good: bytes, tmp_path: Path, offset: int, count: int) -> None:
    content = good[:offset] + struct.pack("<Q", count) + good[offset + 8 :]
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"ends before the|is damaged"):
            load(content, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 20 * len(good)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("key", [b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type"])
def test_huge_arrays_cost_nothing(good: bytes, tmp_path: Path, key: bytes) -> None:
    count = good.index(key) + len(key) + 8
    content = good[:count] + struct.pack("<Q", 2**60) + good[count + 8 :]
    with pytest.raises(UserError, match="ends before the"):
        load(content, tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "ends before the 4 bytes"),
        (b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), "GGUF version 1; versions 2 and 3"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "it is big-endian"),
        (b"GGUF" + struct.pack("<I", 3) + bytes(24), "architecture None"),
    ],
)
def test_other_files_are_refused(content: bytes, expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=expected):
        load(content, tmp_path)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            GgufFile(path)


SMALL = {
    "token_embd.weight": (12, 8),
    "output_norm.weight": (8,),
    "blk.0.attn_norm.weight": (8,),
    "blk.0.attn_q.weight": (8, 8),
    "blk.0.attn_k.weight": (8, 8),
    "blk.0.attn_v.weight": (8, 8),
    "blk.0.attn_output.weight": (8, 8),
    "blk.0.ffn_norm.weight": (8,),
    "blk.0.ffn_gate.weight": (16, 8),
    "blk.0.ffn_up.weight": (16, 8),
    "blk.0.ffn_down.weight": (8, 16),
}
NUMBERS = {
    "llama.block_count": 1,
    "llama.context_length": 32,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2,
}


def small(path: Path, numbers: dict, tensors: dict[str, tuple[int, ...]], architecture: str = "llama") -> GgufFile:
    """A file with the smallest llama there is, changed by what is given (None takes away)."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in (NUMBERS | numbers).items():
        if value is not None:
            adders: dict[type, Any] = {
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
                list: writer.add_array,
            }
            adders[type(value)](key, value)
    for name, shape in (SMALL | tensors).items():
        if shape is not None:
            odd = name == "rope_freqs.weight"  # long waves as they are and short ones stretched
            writer.add_tensor(name, np.full(shape, [3.0, 1.0] if odd else 1.0, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.parametrize(
    ("numbers", "tensors", "expected"),
    [
        ({"llama.block_count": None}, {}, "has no llama.block_count"),
        ({"llama.block_count": 4_000_000_000}, {}, "announces 4000000000 layers"),
        ({"llama.block_count": 2}, {}, "its model has"),
        ({"llama.block_count": "one"}, {}, "num_hidden_layers in .* is 'one'"),
        ({"llama.embedding_length": 2**31}, {}, "hidden_size"),
        ({"llama.embedding_length": 16}, {}, "its model has"),
        ({"llama.feed_forward_length": 8}, {}, "ffn_gate.weight has shape"),
        ({"llama.attention.head_count": 0}, {}, "num_attention_heads"),
        ({"llama.attention.head_count": 3}, {}, "num_attention_heads|attn_q.weight has shape|even"),
        ({"llama.attention.head_count": [2, 4]}, {}, "num_attention_heads"),
        ({"llama.attention.scale": 0.5}, {}, "sets llama.attention.scale to 0.5"),
        ({"llama.rope.scaling.type": "weird"}, {}, "scales its rope by 'weird'"),
        ({"llama.rope.dimension_count": 2}, {}, "partial_rotary_factor"),
        ({"split.count": 3}, {}, "one part of several"),
        ({}, {"token_embd.weight": None}, "has no token_embd.weight"),
        ({}, {"blk.0.attn_k.weight": None, "spare": (8, 8)}, "has no blk.0.attn_k.weight"),
        ({}, {"blk.0.attn_k.weight": (4, 16)}, "attn_k.weight has shape"),
        ({}, {"blk.0.attn_sinks.weight": (2,)}, "holds blk.0.attn_sinks.weight"),
        ({}, {"rope_freqs.weight": (2,)}, "divisors that are not Llama-3's"),
        ({}, {"rope_freqs.weight": (2, 2)}, "no vector"),
    ],
)
def test_contradictions_are_refused(numbers: dict, tensors: dict, expected: str, tmp_path: Path) -> None:
    file = small(tmp_path / "a.gguf", numbers, tensors)
    with pytest.raises(UserError, match=expected):
        load_gguf(file, device="cpu", dtype=torch.float32)


def test_unknown_architectures_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="architecture 'mamba'; supported are llama, qwen2"):
        load_gguf(small(tmp_path / "a.gguf", {}, {}, "mamba"), device="cpu", dtype=torch.float32)


def test_the_smallest_llama_loads_and_parts_of_tensors_can_be_read(tmp_path: Path) -> None:
    file = small(tmp_path / "a.gguf", {}, {})
    model = load_gguf(file, device="cpu", dtype=torch.float32)
    assert all((parameter == 1).all() for parameter in model.parameters())
    assert load_gguf_tokenizer(file) is None
    assert file.read("token_embd.weight", 3, 7).shape == (4, 8)
    assert file.read("output_norm.weight", 2, 5).shape == (3,)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32"])
def test_stored_types_are_read_as_the_gguf_package_reads_them(kind: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(3, 4, 64)).astype(np.float32)
    stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", stored, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = gguf.GGUFReader(path).tensors[0]
    expected = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
    assert np.array_equal(GgufFile(path).read("x"), expected)
    assert np.array_equal(GgufFile(path).read("x", 1, 3), expected[1:3])


def test_types_that_cannot_be_decoded_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", np.zeros((2, 292), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="stores x as Q8_K"):
        GgufFile(path).read("x")
