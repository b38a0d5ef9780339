"""A file that is not what was written is found when it is loaded, whatever is wrong with it."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models.test_loading import SPEC
from tests.models.test_tokenizer import CORPUS
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.files.checksums import BLOCK_BYTES, BLOCKS_AT_ONCE, NAME, digest, verify
from tightfit.models.generate import Sampling, continue_text
from tightfit.models.initialisation import init_weights
from tightfit.models.loading import load_model
from tightfit.models.saving import export_model, write_model
from tightfit.models.text.tokenizer import train_tokenizer
from tightfit.serve.config import EngineConfig
from tightfit.serve.requests.sampling import Sampling as ServedSampling
from tightfit.serve.start import start_engine
from tightfit.serve.streams import sample_streams
from tightfit.train.evaluation import evaluate_source

SIZES = [0, 1, 7, 8, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 9, BLOCK_BYTES * BLOCKS_AT_ONCE + 5]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("exported")
    made = Decoder(SPEC)
    init_weights(made)
    (folder / "source").mkdir()
    write_model(folder / "source", made, train_tokenizer(CORPUS, 265))
    export_model(str(folder / "source"), folder / "model", form="hf", dtype="fp32")
    return folder / "model"


@pytest.fixture
def model(exported: Path) -> Iterator[Path]:
    """The exported model, put right again afterwards."""
    saved = {path: path.read_bytes() for path in exported.iterdir()}
    yield exported
    for path, content in saved.items():
        path.write_bytes(content)


def test_every_bit_and_every_length_counts(tmp_path: Path) -> None:
    path, chance, seen = tmp_path / "x.safetensors", np.random.default_rng(0), set()
    for size in SIZES:
        content = chance.integers(0, 256, size, dtype=np.uint8).tobytes()
        path.write_bytes(content)
        seen.add(whole := digest(path))
        for at in {0, size // 2, size - 1} if size else ():
            path.write_bytes(content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :])
            assert digest(path) != whole
        path.write_bytes(content + b"\0")
        assert digest(path) != whole, "a zero more changes no sum, but the length"
    assert len(seen) == len(SIZES)


def test_blocks_that_change_places_are_seen(tmp_path: Path) -> None:
    blocks = [bytes([letter]) * BLOCK_BYTES for letter in b"abc"]
    (tmp_path / "a").write_bytes(b"".join(blocks))
    (tmp_path / "b").write_bytes(b"".join(blocks[::-1]))
    assert digest(tmp_path / "a") != digest(tmp_path / "b")


@pytest.mark.parametrize("damage", ["bit", "cut", "missing", "zeros"])
def test_a_damaged_file_gets_a_sentence_and_a_way_out(model: Path, damage: str) -> None:
    load_model(str(model))
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    match damage:
        case "bit":
            content[-5] ^= 1
        case "zeros":
            content[-1000:] = bytes(1000)
    path.write_bytes(content[:-1] if damage == "cut" else content)
    words = {"bit": "not those that were written", "zeros": "not those", "cut": "instead of", "missing": "is missing"}
    if damage == "missing":
        path.unlink()
        with pytest.raises(UserError, match="is missing"):
            verify(model)
        return
    with pytest.raises(UserError, match=words[damage]) as caught:
        load_model(str(model))
    assert "--no-verify" in str(caught.value)
    if damage != "cut":
        assert load_model(str(model), verified=False).source


@pytest.mark.parametrize("content", ["", "[]", '{"files": 3}', '{"files": {"model.safetensors": 3}}'])
def test_a_damaged_list_gets_a_sentence(model: Path, content: str) -> None:
    (model / NAME).write_text(content)
    with pytest.raises(UserError, match=r"checksums\.json"):
        load_model(str(model))


def test_a_list_cannot_reach_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "secret").write_bytes(b"x")
    for name in ("../secret", str(tmp_path / "secret")):
        (tmp_path / "inside" / NAME).write_text(json.dumps({"files": {name: {"bytes": 5}}}))
        with pytest.raises(UserError, match=r"can be compared|is missing"):
            verify(tmp_path / "inside")


def test_a_gguf_file_has_its_list_beside_it(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="pip install 'tightfit[gguf]'")
    file = tmp_path / "model.gguf"
    export_model(str(model), file, form="gguf", dtype="fp32")
    assert (tmp_path / f"model.gguf.{NAME}").is_file()
    load_model(str(file))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.gguf is damaged"):
        load_model(str(file))
    load_model(str(file), verified=False)
    file.unlink()
    export_model(str(model), file, form="gguf", dtype="fp16")
    load_model(str(file))


def test_weights_that_are_no_numbers_get_a_sentence(model: Path, tmp_path: Path) -> None:
    loaded = load_model(str(model))
    with torch.no_grad():
        torch.nn.init.constant_(loaded.model.embed.weight, float("nan"))
    (tmp_path / "nan").mkdir()
    write_model(tmp_path / "nan", loaded.model, loaded.tokenizer)
    (tmp_path / "text.txt").write_text("some words to read " * 20)
    for temperature in (0.0, 0.8):
        with pytest.raises(UserError, match="values that are no numbers: its weights are damaged"):
            next(continue_text(loaded, "a", Sampling(temperature=temperature))[0])
        with pytest.raises(UserError, match="values that are no numbers: its weights are damaged"):
            sample_streams(loaded, "a", ServedSampling(temperature=temperature))
    with pytest.raises(UserError, match="values that are no numbers: its weights are damaged"):
        start_engine(str(tmp_path / "nan"), EngineConfig(), device="cpu")
    with pytest.raises(UserError, match=r"the loss of .* is nan: its weights are damaged"):
        evaluate_source(str(tmp_path / "nan"), [str(tmp_path / "text.txt")], sequence_length=16, cache=tmp_path)


def test_a_shape_larger_than_its_files_takes_no_memory(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10_000, "hidden_size": 2**20}))
    with pytest.raises(UserError, match=r"parameters, but its \.safetensors have only"):
        load_model(str(model))
