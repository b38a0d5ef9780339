"""Weight files that are not what they should be: one sentence for the user, and the model untouched."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models.huggingface.reference import pair
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.weights import load_weights, save_weights, to_hf_state


def spoiled(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Llama's weights in one file, after `change` has had its way with them."""
    ours = pair("llama").ours
    tensors = {name: tensor.clone() for name, tensor in to_hf_state(ours, ours.spec).items()}
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


NORM, Q = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
BAD_TENSORS = {
    "missing": (lambda t: t.pop(NORM), "misses model.norm.weight"),
    "several-missing": (lambda t: [t.pop(n) for n in list(t)[:5]], "and 2 more"),
    "extra": (lambda t: t.update({"model.layers.2.self_attn.q_proj.weight": torch.zeros(2)}), "layers.2.self_attn"),
    "shape": (
        lambda t: t.update({Q: t[Q][:, :-1].contiguous()}),
        r"has shape \(32, 31\) where the model has \(32, 32\)",
    ),
    "transposed": (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T.contiguous()}), r"\(32, 61\)"),
    "scalar": (lambda t: t.update({Q: torch.tensor(1.0)}), r"has shape \(\)"),
    "integers": (lambda t: t.update({Q: t[Q].to(torch.int8)}), "stored as I8"),
    "float8": (lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}), "stored as F8_E4M3"),
    "twice": (lambda t: t.update({"norm.weight": t[NORM].clone()}), "twice"),
}


@pytest.mark.parametrize("what", BAD_TENSORS)
def test_wrong_tensors(what: str, tmp_path: Path) -> None:
    change, message = BAD_TENSORS[what]
    spoiled(tmp_path, change)
    model = deepcopy(pair("llama").ours)
    with pytest.raises(UserError, match=message):
        load_weights(model, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), pair("llama").ours.parameters(), strict=True))


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 5000])
def test_truncated_file(keep: int, tmp_path: Path) -> None:
    spoiled(tmp_path, lambda tensors: None)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        load_weights(Decoder(pair("llama").ours.spec), tmp_path)


HOSTILE_HEADERS = {
    "length": (2**62).to_bytes(8, "little"),
    "not-json": (8).to_bytes(8, "little") + b"\xff" * 8,
    "offsets": (lambda h: len(h).to_bytes(8, "little") + h)(
        b'{"model.norm.weight":{"dtype":"F32","shape":[4],"data_offsets":[0,99999]}}'
    ),
    "huge-shape": (lambda h: len(h).to_bytes(8, "little") + h)(
        b'{"model.norm.weight":{"dtype":"F32","shape":[9999999999,9999999999],"data_offsets":[0,4]}}1234'
    ),
}


@pytest.mark.parametrize("what", HOSTILE_HEADERS)
def test_hostile_header(what: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(HOSTILE_HEADERS[what])
    with pytest.raises(UserError, match="cannot be read"):
        load_weights(Decoder(pair("llama").ours.spec), tmp_path)


@pytest.mark.parametrize(
    "file",
    [
        *("../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "a\\b.safetensors", "..", "", 7, None),
        *("weights.bin", ".hidden.safetensors", "x.safetensors\n"),
    ],
)
def test_index_may_only_name_files_beside_it(file: object, tmp_path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="beside the index"):
        load_weights(Decoder(pair("llama").ours.spec), tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not JSON"),
        ("[]", "weight_map"),
        ("{}", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": ["a"]}', "weight_map"),
        ('{"weight_map": {"model.norm.weight": "gone.safetensors"}}', "gone.safetensors does not exist"),
        ('{"weight_map": {"model.norm.weight": "there.safetensors"}}', "misses model.norm.weight, which"),
    ],
)
def test_broken_index(index: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    save_file({"other": torch.zeros(1)}, tmp_path / "there.safetensors")
    with pytest.raises(UserError, match=message):
        load_weights(Decoder(pair("llama").ours.spec), tmp_path)


def test_directories_without_safetensors(tmp_path: Path) -> None:
    model = Decoder(pair("llama").ours.spec)
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        load_weights(model, tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="can run code"):
        load_weights(model, tmp_path)


def test_model_without_memory_is_refused(tmp_path: Path) -> None:
    save_weights(pair("llama").ours, tmp_path)
    with torch.device("meta"):
        model = Decoder(pair("llama").ours.spec)
    with pytest.raises(ValueError, match="meta device"):
        load_weights(model, tmp_path)
