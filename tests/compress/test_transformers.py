"""transformers with its own backends loads what we write, and computes the logits we compute.

The backends (compressed-tensors, gptqmodel with optimum, bitsandbytes) are not installed with the tests; where they
are, these run.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.compress.conftest import random_model
from tests.compress.test_compression import FAMILIES, TOKENS, logits, run
from tightfit.compress.recipe import Recipe, Step, recipe_of
from tightfit.models.loading import load_model
from tightfit.models.saving import write_model
from tightfit.models.text.tokenizer import Tokenizer

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "compressed-tensors": ("gptq", {"bits": 4, "group": 32}, "compressed_tensors"),
    "compressed-tensors head": ("rtn", {"bits": 4, "group": 64, "head": 4}, "compressed_tensors"),
    "compressed-tensors head in 8 bits": (
        "gptq",
        {"bits": 4, "group": 32, "symmetric": True, "head": 8},
        "compressed_tensors",
    ),
    "compressed-tensors head in 8 bits beside zero points": (
        "rtn",
        {"bits": 4, "group": 32, "head": 8},
        "compressed_tensors",
    ),
    "compressed-tensors 3 bits": ("rtn", {"bits": 3, "group": 32}, "compressed_tensors"),
    "compressed-tensors asymmetric per row": ("rtn", {"bits": 4, "group": 0}, "compressed_tensors"),
    "compressed-tensors asymmetric per tensor": ("rtn", {"bits": 4, "group": -1}, "compressed_tensors"),
    "compressed-tensors symmetric per tensor": ("rtn", {"bits": 8, "group": -1}, "compressed_tensors"),
    "compressed-tensors fp8": ("fp8", {}, "compressed_tensors"),
    "compressed-tensors int8 static": ("smoothquant", {"static": "mse"}, "compressed_tensors"),
    "compressed-tensors int8 static per tensor": (
        "rtn",
        {"bits": 8, "group": -1, "activations": "int8", "static": "minmax"},
        "compressed_tensors",
    ),
    "compressed-tensors fp8 per tensor": ("fp8", {"group": -1}, "compressed_tensors"),
    "compressed-tensors fp8 static": ("fp8", {"activations": "fp8", "static": "minmax"}, "compressed_tensors"),
    "compressed-tensors nvfp4": ("nvfp4", {}, "compressed_tensors"),
    "gptq": ("gptq", {"bits": 4, "group": 32, "symmetric": True}, "gptqmodel"),
    "gptq reordered": ("gptq", {"bits": 4, "group": 32, "symmetric": False, "act_order": "groups"}, "gptqmodel"),
    "awq": ("awq", {"bits": 4, "group": 32}, "gptqmodel"),
    "bitsandbytes nf4": ("nf4", {}, "bitsandbytes"),
}


def their_logits(directory: Path, dtype: torch.dtype) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        device_map="cpu",
        attn_implementation="eager",  # older versions' sdpa has no soft cap
    )
    with torch.no_grad():
        found: Tensor = model(TOKENS).logits.float()
    return found


@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_the_same(name: str, tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    method, options, backend = CASES[name]
    pytest.importorskip(backend)
    form = name.split()[0]
    if name.endswith("3 bits"):
        helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
        if helpers.pack_to_int32(torch.zeros(1, 32, dtype=torch.int8), 3).shape[1] != 3:
            pytest.skip("this compressed-tensors leaves gaps between words of 3-bit codes")
    run(tiny, tmp_path / "small", recipe_of(method, **options), text, token_cache, format=form)
    narrow = name.endswith("nvfp4")  # whose plain path in that package computes in bfloat16
    ours = logits(tmp_path / "small")
    theirs = their_logits(tmp_path / "small", torch.bfloat16 if narrow else torch.float32)
    assert float((ours - theirs).abs().max()) < (0.05 if narrow else 1e-3) * float(ours.abs().max())
    if "static" in name:  # which is no likeness of weights alone
        with torch.no_grad():
            unrounded = load_model(str(tmp_path / "small"), packed=False).model(TOKENS).logits
        assert float((unrounded - theirs).abs().max()) > 5e-3 * float(ours.abs().max())


MIXES: dict[str, list[Step]] = {
    "integers": [
        Step(method="rtn", bits=4, group=32),
        Step(method="rtn", bits=3, group=64, layers=("*.down",)),
        Step(method="rtn", bits=4, group=32, symmetric=True, layers=("*.o",)),
        Step(method="rtn", bits=8, layers=("*.q",)),
        Step(method="keep", layers=("layers.1.mlp.up",)),
    ],
    "fp8": [Step(method="fp8"), Step(method="rtn", bits=4, group=32, layers=("*.mlp.*",))],
    "one scale a matrix": [
        Step(method="rtn", bits=5, group=-1),
        Step(method="rtn", bits=4, group=32, layers=("*.mlp.*",)),
    ],
}


@pytest.mark.parametrize("name", MIXES)
def test_codes_that_differ_by_layer(name: str, tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    run(tiny, tmp_path / "small", Recipe(tuple(MIXES[name])), text, token_cache)
    ours, theirs = logits(tmp_path / "small"), their_logits(tmp_path / "small", torch.float32)
    assert float((ours - theirs).abs().max()) < 1e-3 * float(ours.abs().max())


@pytest.mark.parametrize("others", [4, 8])
def test_experts_beside_other_codes(
    others: int, tokenizer: Tokenizer, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    """Whose scheme is that of the first config group which names modules, whatever these are."""
    pytest.importorskip("compressed_tensors")
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", random_model(FAMILIES["qwen3_moe"]), tokenizer)
    experts = Step(method="rtn", bits=12 - others, group=8, symmetric=True)
    recipe = Recipe((experts, replace(experts, bits=others, layers=("*.attention.*",))))
    run(tmp_path / "model", tmp_path / "small", recipe, text, token_cache)
    ours, theirs = logits(tmp_path / "small"), their_logits(tmp_path / "small", torch.float32)
    assert float((ours - theirs).abs().max()) < 1e-3 * float(ours.abs().max())


@pytest.mark.parametrize("method", ["rtn", "gptq", "fp8"])
def test_experts_as_recipes_leave_them(
    method: str, tokenizer: Tokenizer, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", random_model(FAMILIES["qwen3_moe"]), tokenizer)
    run(tmp_path / "model", tmp_path / "small", recipe_of(method), text, token_cache)
    ours, theirs = logits(tmp_path / "small"), their_logits(tmp_path / "small", torch.float32)
    assert float((ours - theirs).abs().max()) < 1e-3 * float(ours.abs().max())


@pytest.mark.parametrize("method", ["smoothquant", "nvfp4"])
def test_experts_that_are_said_not_to_load(
    method: str, tokenizer: Tokenizer, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    """Where a newer transformers loads them, there is no more to say."""
    pytest.importorskip("compressed_tensors")
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", random_model(FAMILIES["qwen3_moe"]), tokenizer)
    report = run(tmp_path / "model", tmp_path / "small", recipe_of(method), text, token_cache)
    assert report.predicted.transformers_limit
    ours = logits(tmp_path / "small")
    try:
        theirs = their_logits(tmp_path / "small", torch.bfloat16)
    except RuntimeError:
        return
    assert float((ours - theirs).norm()) > 0.5 * float(ours.norm())


@pytest.mark.parametrize("name", ["gptq", "gptq 8 bits", "gptq head", "awq"])
def test_gptqmodel_computes_the_same(name: str, tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    """Without transformers' part of loading. Asymmetric codes in GPTQ's layout it takes from itself alone (7.7)."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it asks for two on every machine
    package = pytest.importorskip("gptqmodel")
    method, options, _ = CASES[name.split()[0]]
    more = {"gptq 8 bits": {"bits": 8}, "gptq head": {"group": 64, "head": 4}}.get(name, {})
    run(tiny, tmp_path / "small", recipe_of(method, **{**options, **more}), text, token_cache, format=name.split()[0])
    backend = package.BACKEND.AUTO if name == "awq" else package.BACKEND.TORCH
    read = package.GPTQModel.load(str(tmp_path / "small"), device="cpu", backend=backend, dtype=torch.float16)
    with torch.no_grad():
        theirs = read.model(TOKENS).logits.float()
    ours = logits(tmp_path / "small")
    assert float((ours - theirs).abs().max()) < 1e-2 * float(ours.abs().max())  # in float16, as it has no float32
