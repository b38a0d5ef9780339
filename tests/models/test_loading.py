"""Loading: every kind of source gives the weights it holds, and every wrong one a sentence."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.models.test_tokenizer import CORPUS
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.gguf.model import write_gguf
from tightfit.models.initialisation import init_weights
from tightfit.models.loading import (
    LoadedModel,
    has_weights,
    load_model,
    load_source_tokenizer,
    source_spec,
    weight_file_bytes,
)
from tightfit.models.saving import write_model
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import Tokenizer, train_tokenizer

SPEC = ModelSpec(
    family="llama",
    vocab_size=270,
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_size=40,
    max_positions=64,
    tied=True,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(CORPUS, 265)


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(0)
    made = Decoder(SPEC)
    init_weights(made)
    return made


@pytest.fixture
def directory(model: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder, model, tokenizer)
    return folder


def same(loaded: LoadedModel, model: Decoder) -> None:
    found = loaded.model.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name


def test_a_directory(directory: Path, model: Decoder, tokenizer: Tokenizer) -> None:
    loaded = load_model(str(directory))
    same(loaded, model)
    assert loaded.source == str(directory)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.fingerprint == tokenizer.fingerprint
    assert has_weights(str(directory))
    assert source_spec(str(directory)) == SPEC
    assert load_source_tokenizer(str(directory)).fingerprint == tokenizer.fingerprint


def test_a_loaded_model_is_tied_typed_and_trainable(directory: Path) -> None:
    loaded = load_model(str(directory), dtype=torch.bfloat16).model
    assert loaded.head.weight is loaded.embed.weight
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in loaded.parameters())


def test_a_gguf_file(model: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = str(tmp_path / "a.gguf")
    write_gguf(model, tokenizer, Path(path), "fp32")
    loaded = load_model(path)
    same(loaded, model)
    assert loaded.model.head.weight is loaded.model.embed.weight
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode_many(CORPUS) == tokenizer.encode_many(CORPUS)
    assert has_weights(path)
    assert source_spec(path) == SPEC
    assert load_source_tokenizer(path).special_tokens == tokenizer.special_tokens


def test_a_run_gives_its_newest_complete_checkpoint(directory: Path, model: Decoder, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("step-000009", "step-000100", ".partial-step-000200-abc", "step-last"):
        shutil.copytree(directory, run / "checkpoints" / name)
    (run / "checkpoints" / "step-000300").write_text("not a directory")
    other = Decoder(SPEC)
    write_model(run / "checkpoints" / "step-000009", other, None)
    same(load_model(str(run)), model)
    assert source_spec(str(run)) == SPEC
    assert has_weights(str(run))
    same(load_model(str(run / "checkpoints" / "step-000009")), other)


def test_a_directory_without_tokenizer(model: Decoder, tmp_path: Path) -> None:
    write_model(tmp_path, model, None)
    assert load_model(str(tmp_path)).tokenizer is None
    with pytest.raises(UserError, match="has no tokenizer"):
        load_source_tokenizer(str(tmp_path))


def test_shapes_have_no_weights(directory: Path) -> None:
    with pytest.raises(UserError, match="a preset has no weights"):
        load_model("llama-3.2-1b")
    with pytest.raises(UserError, match="shape without tokenizer"):
        load_source_tokenizer("llama-3.2-1b")
    assert not has_weights("llama-3.2-1b")
    assert source_spec("llama-3.2-1b").hidden_size == 2048
    config = str(directory / "config.json")
    assert not has_weights(config)
    assert source_spec(config) == SPEC
    with pytest.raises(UserError, match="shape without weights"):
        load_model(config)


def test_a_directory_named_like_a_preset(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(directory, tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert source_spec("./gpt2") == source_spec("./gpt2/config.json") == SPEC
    assert source_spec("gpt2").family == "gpt2"


def test_wrong_sources_are_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("hello, hello")
    for source, expected in {
        "nowhere": "no model at 'nowhere'",
        "empty": "has no config.json",
        "run": "without a complete checkpoint",
        "notes.txt": "is not a GGUF file",
        "a\0b": "no model at|not a name",
        "x" * 5000: "not a name",
    }.items():
        with pytest.raises(UserError, match=expected):
            load_model(source if source == "nowhere" else f"{tmp_path}/{source}")
    assert not has_weights("nowhere")
    with pytest.raises(UserError, match="nowhere"):
        source_spec("nowhere")


def test_broken_directories_are_refused(directory: Path) -> None:
    weights = directory / "model.safetensors"
    content = weights.read_bytes()
    for broken in (content[:50], content[: len(content) // 2], b""):
        weights.write_bytes(broken)
        with pytest.raises(UserError, match="safetensors"):
            load_model(str(directory))
    weights.write_bytes(content)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(UserError, match="shape"):
        load_model(str(directory))
    (directory / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        load_model(str(directory))
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json is not JSON"):
        load_model(str(directory))


def test_bytes_of_weights_are_not_those_of_an_optimizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name, size in {"model-00001": 30, "model-00002": 12, "optimizer": 900}.items():
        (tmp_path / f"{name}.safetensors").write_bytes(b"x" * size)
    assert weight_file_bytes(str(tmp_path)) == 42
