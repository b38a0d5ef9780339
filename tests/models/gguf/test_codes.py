"""GGUF's 4-bit matrices in their codes: the numbers of the file, and only where a CPU multiplies by them."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.compress.conftest import SPEC, random_model
from tests.models.test_tokenizer import CORPUS
from tightfit.compress.gguf.gguf_export import GgufCoder
from tightfit.kernels.quantized.int4_linear import code_order
from tightfit.models.gguf import codes
from tightfit.models.gguf.file import GgufFile
from tightfit.models.gguf.model import load_gguf, write_gguf
from tightfit.models.loading import load_model
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import train_tokenizer

gguf = pytest.importorskip("gguf")
here = pytest.mark.skipif(code_order() is None, reason="this CPU's torch has no fast product with 4-bit codes")
WIDE = replace(SPEC, hidden_size=128, heads=2, kv_heads=1, head_dim=64)
QWEN = replace(WIDE, family="qwen2", qkv_bias=True)


def written(path: Path, mixture: str, spec: ModelSpec = WIDE) -> Path:
    """By default a Llama, whose rows of queries and keys GGUF orders otherwise."""
    model = random_model(spec)
    with torch.no_grad():
        model.get_parameter("layers.0.mlp.up.weight")[5] = 0.25
    write_gguf(model, train_tokenizer(CORPUS, 265), path, "fp16", GgufCoder(spec, mixture))
    return path


@here
@pytest.mark.parametrize(("spec", "mixture"), [(WIDE, "q4_0"), (WIDE, "q4_1"), (QWEN, "q4_0")])
def test_codes_stand_for_the_files_numbers(spec: ModelSpec, mixture: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.gguf", mixture, spec)
    coded = load_model(str(path), coded_gguf=True).model
    plain = load_gguf(GgufFile(path), device="cpu", dtype=torch.float32)
    layers = {name: part for name, part in coded.named_modules() if isinstance(part, QuantizedLinear)}
    assert len(layers) == 7 * WIDE.layers
    for name, part in layers.items():
        wanted: Any = plain.get_submodule(name)
        torch.testing.assert_close(part.dequantize(torch.float32), wanted.weight.detach(), rtol=0, atol=2e-7)
        assert part.scheme.symmetric is (mixture == "q4_0")
        assert (part.bias is None) is (wanted.bias is None)
        assert part.bias is None or torch.equal(part.bias, wanted.bias)
    own = coded.state_dict()
    rest = {name: value for name, value in plain.state_dict().items() if name in own}
    assert all(torch.equal(own[name], value) for name, value in rest.items())
    assert own["head.weight"].data_ptr() == own["embed.weight"].data_ptr()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_blocks_are_the_gguf_packages(kind: Literal["Q4_0", "Q4_1"]) -> None:
    values = np.random.default_rng(0).normal(size=(4, 128)).astype(np.float32)
    values[1, :32], values[2] = 3.5, 0  # blocks of one number
    stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    parts = codes._split_blocks(torch.from_numpy(stored), kind)
    zero = parts.get("zero", torch.full_like(parts["scale"], 8))
    found = (parts["codes"].float().unflatten(1, (4, 32)) - zero[..., None]) * parts["scale"][..., None]
    wanted = torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind]))
    torch.testing.assert_close(found.flatten(1), wanted, rtol=0, atol=1e-6)


def test_other_types_and_other_cpus_have_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eight_bits = load_model(str(written(tmp_path / "a.gguf", "q8_0")), coded_gguf=True).model
    monkeypatch.setattr(codes, "takes_int4", lambda *shape: False)
    elsewhere = load_model(str(written(tmp_path / "b.gguf", "q4_0")), coded_gguf=True).model
    for model in (eight_bits, elsewhere):
        assert not any(isinstance(part, QuantizedLinear) for part in model.modules())
