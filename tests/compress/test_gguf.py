"""GGUF blocks: the gguf package reads what we write, errors are no larger than its own, llama.cpp runs the files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compress.conftest import SPEC, random_model
from tests.covering import sampled, thorough
from tightfit.compress.calibration.inputs import output_error
from tightfit.compress.gguf.gguf_blocks import CODERS, encode_rows
from tightfit.compress.gguf.gguf_export import GgufCoder, export_gguf
from tightfit.compress.gguf.gguf_feedback import encode_with_feedback
from tightfit.errors import UserError
from tightfit.models.loading import load_model
from tightfit.models.saving import write_model
from tightfit.models.text.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf")
ROUGHLY = {
    "Q8_0": 3e-5,
    "Q4_0": 7e-3,
    "Q4_1": 5.5e-3,
    "Q5_0": 1.8e-3,
    "Q5_1": 1.4e-3,
    "Q4_K": 5.5e-3,
    "Q5_K": 1.4e-3,
    "Q6_K": 3.2e-4,
}
"""Relative squared errors of normal numbers; a wrong bit anywhere is far above them."""


def read(blocks: Tensor, kind: str) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


def error(made: Tensor, wanted: Tensor, weights: Tensor | None = None) -> float:
    own = torch.ones_like(wanted) if weights is None else weights.expand(wanted.shape)
    return float(((made - wanted).square() * own).sum() / (wanted.square() * own).sum())


@pytest.mark.parametrize("kind", CODERS)
def test_blocks(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 512, generator=generator) * 0.05
    weight[3] = 0
    plain = read(encode_rows(weight, kind), kind)
    assert error(plain, weight) < ROUGHLY[kind]
    assert bool((plain[3] == 0).all())
    importance = torch.rand(512, generator=generator) ** 4 + 1e-3
    weighed = read(encode_rows(weight, kind, importance), kind)
    if kind != "Q8_0":
        assert error(weighed, weight, importance) < 0.97 * error(plain, weight, importance)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_searching_beats_the_package(kind: str) -> None:
    weight = torch.randn(16, 512, generator=torch.Generator().manual_seed(1))
    theirs = torch.from_numpy(gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind]))
    assert error(read(encode_rows(weight, kind), kind), weight) < 0.95 * error(read(theirs, kind), weight)


@sampled(3)
@pytest.mark.parametrize("kind", [kind for kind in CODERS if kind != "Q8_0"])
def test_errors_passed_on_leave_less_of_them(kind: str) -> None:
    """Inputs that go together: what rounding does to one, codes of the others make up for."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(2048, 64, generator=generator) @ torch.randn(64, 512, generator=generator)
    hessian = (inputs + 0.3 * torch.randn(2048, 512, generator=generator)).T.cov()
    weight = torch.randn(16, 512, generator=generator)
    weight[3] = 0
    blocks, meant = encode_with_feedback(weight, kind, hessian)
    torch.testing.assert_close(read(blocks, kind), meant)
    assert bool((meant[3] == 0).all())
    nearest = read(encode_rows(weight, kind, hessian.diagonal()), kind)
    assert output_error(meant - weight, hessian) < 0.5 * output_error(nearest - weight, hessian)


def test_the_mixture() -> None:
    coder = GgufCoder(replace(SPEC, layers=8, hidden_size=256), "q4_k_m")
    down = [coder.kind(f"layers.{i}.mlp.down.weight", (256, 512)) for i in range(8)]
    assert down == ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]
    assert coder.kind("layers.1.attention.q.weight", (256, 256)) == "Q4_K"
    assert coder.kind("layers.1.attention.q.weight", (256, 96)) == "Q5_0"
    assert coder.kind("embed.weight", (300, 256)) == "Q6_K"
    assert coder.kind("norm.weight", (256,)) == "F32"


@pytest.fixture(scope="module")
def wide(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows are whole blocks of 256."""
    folder = tmp_path_factory.mktemp("wide")
    spec = replace(SPEC, hidden_size=256, head_dim=64, mlp_size=512, layers=1)
    write_model(folder, random_model(spec), tokenizer)
    return folder


@sampled(2)
@pytest.mark.parametrize("mixture", ["q4_k_m", "q5_k_m", thorough("q6_k"), "q4_0"])
def test_llama_cpp_computes_the_same(mixture: str, wide: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    from tests.models.gguf.llama_cpp import llama_cpp

    target = tmp_path / "small.gguf"
    export_gguf(
        str(wide),
        target,
        mixture,
        (str(text),),
        samples=4,
        length=64,
        cache=token_cache,
        device=torch.device("cpu"),
    )
    model = load_model(str(target)).model
    prompt = list(range(5, 25))
    with torch.no_grad():
        ours = model(torch.tensor(prompt)[None]).logits[0, -1].log_softmax(-1)
    with llama_cpp(target) as theirs:
        found = torch.tensor(theirs.logprobs(prompt, SPEC.vocab_size))
    # llama.cpp rounds activations to 8 bits before it multiplies
    likely = ours > ours.max() - 8
    assert float((found - ours)[likely].abs().max()) < 0.15


def test_nothing_is_written_over(wide: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        export_gguf(
            str(wide),
            tmp_path / "mine.gguf",
            "q4_k_m",
            (),
            samples=1,
            length=8,
            cache=tmp_path,
            device=torch.device("cpu"),
        )
    assert (tmp_path / "mine.gguf").read_text() == "mine"


def test_what_cannot_be_written_is_known_before_work(
    wide: Path, tokenizer: Tokenizer, token_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family without a GGUF form, or text of less than a row: nothing is loaded or coded for them."""
    (tmp_path / "phi").mkdir()
    write_model(tmp_path / "phi", random_model(replace(SPEC, family="phi3", tied=False)), tokenizer)
    (tmp_path / "short.txt").write_text("hello")
    monkeypatch.setattr("tightfit.compress.gguf.gguf_export.load_model", None)
    options: dict[str, Any] = {"samples": 1, "length": None, "cache": token_cache, "device": torch.device("cpu")}
    with pytest.raises(UserError, match=r"phi3 models cannot be written to GGUF, only .* convert it with llama.cpp's"):
        export_gguf(str(tmp_path / "phi"), tmp_path / "phi.gguf", "q4_0", (), **options)
    with pytest.raises(UserError, match=r"has \d+ tokens, less than one row of \d+; give more text$"):
        export_gguf(str(wide), tmp_path / "wide.gguf", "q4_0", (str(tmp_path / "short.txt"),), **options)
    assert {path.name for path in tmp_path.iterdir()} == {"phi", "short.txt"}
