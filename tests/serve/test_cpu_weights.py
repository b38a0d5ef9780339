"""What a compressed directory was said to take on a CPU, from headers alone, beside what an engine holds there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compress.conftest import SPEC, random_model
from tests.compress.conftest import text as text
from tests.compress.conftest import tokenizer as tokenizer  # of `SPEC`
from tests.covering import sampled
from tests.plan.serving.test_cpu_seconds import RATES, machine
from tightfit.compress.compression import CompressionJob, compress
from tightfit.compress.conversion import convert
from tightfit.compress.recipe import Recipe, Step, recipe_of
from tightfit.compress.structure.factoring import FactoringJob, factorise
from tightfit.jobs.served_weights import served_weights
from tightfit.kernels.quantized.int4_linear import code_order, takes_int4
from tightfit.models.quantized.scheme import Scheme
from tightfit.models.saving import write_model
from tightfit.models.spec import Experts, ModelSpec
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.plan.serving.plan import make_serving
from tightfit.serve.config import EngineConfig
from tightfit.serve.start import start_engine
from tightfit.serve.weights.half import cpu_has_products

CONFIG = EngineConfig(max_sequences=2, step_tokens=32, max_length=64, cache_bytes=2**22)
SILENT: Any = (lambda cost: None, lambda done, total, layer: None)
CONSTANTS = {"FEWEST_EXPANDED": ("serve.weights.cpu_codes",), "FEWEST_COPIED": ("serve.weights.half",)}
WIDE = replace(SPEC, hidden_size=128, heads=2, kv_heads=1, head_dim=64, tied=False)
"""Whose layers a CPU can all read in 4 bits; of `SPEC` not queries, keys and values."""
SPECS: dict[str, ModelSpec] = {
    "tied": SPEC,
    "wide": WIDE,
    "biases": replace(WIDE, family="qwen2", qkv_bias=True),
    "fused": replace(WIDE, family="phi3"),
    "experts": replace(WIDE, family="mixtral", experts=Experts(count=4, per_token=2, mlp_size=128)),
}
RECIPES: dict[str, Recipe] = {
    "int4": recipe_of("rtn", bits=4, group=32),
    "int4 symmetric": recipe_of("rtn", bits=4, group=64, symmetric=True),
    "int4 by rows": recipe_of("rtn", bits=4, group=0),
    "int4 and a head": recipe_of("rtn", bits=4, group=32, head=4),
    "int4 and a wide head": recipe_of("rtn", bits=4, group=32, head=8),
    "int3": recipe_of("rtn", bits=3, group=32),
    "int8": recipe_of("rtn", bits=8),
    "int8 of a tensor": recipe_of("rtn", bits=8, group=-1),
    "nf4": recipe_of("nf4"),
    "mxfp4": recipe_of("mxfp4"),
    "nvfp4": recipe_of("nvfp4"),
    "binary": recipe_of("binary", group=32),
    "fp8": recipe_of("fp8"),
    "fp8 inputs too": recipe_of("fp8", activations="fp8"),
    "int8 inputs too": recipe_of("rtn", bits=8, group=0, symmetric=True, activations="int8"),
    "llm.int8": recipe_of("llm.int8"),
    "half of the layers": Recipe((Step(method="rtn", bits=4, group=32), Step(method="keep", layers=("layers.0.*",)))),
    "two kinds": Recipe(
        (Step(method="fp8", layers=("*.mlp.*",)), Step(method="rtn", bits=4, group=32, layers=("*.attention.*",)))
    ),
}


IMPOSSIBLE = {
    *(("fused", recipe) for recipe in ("int8 of a tensor", "nf4", "nvfp4")),
    *(("experts", recipe) for recipe in ("int8 of a tensor", "nf4", "llm.int8")),
}


@pytest.fixture(params=[True, False], ids=["many weights", "few weights"], autouse=True)
def thresholds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if tiny matrices were worth to be expanded and copied, and as they are."""
    for name, modules in CONSTANTS.items() if request.param else ():
        for module in ("plan.serving.cpu_weights", *modules):
            monkeypatch.setattr(f"tightfit.{module}.{name}", 1)


def assert_held_as_planned(folder: Path) -> None:
    """To the byte: weights, and their copy in 16 bits."""
    _, engine = start_engine(str(folder), CONFIG, device="cpu")
    held = [*engine.model.parameters(), *engine.model.buffers()]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
    products: dict[Any, Any] = {"fp32": RATES.products["fp32"]}
    products |= {"fp16": RATES.products["fp16"]} if cpu_has_products() else {}
    products |= {"int4": RATES.products["int4"]} if code_order() is not None else {}
    here, spec = machine(replace(RATES, products=products)), engine.model.spec
    planned = make_serving("here", spec, here, "bf16", 64, 1, compressed=served_weights(folder, spec))
    told = [line for line in planned.ledger.lines if line.component == "weights" and line.phase == "forward"]
    copied = sum(line.bytes for line in told if line.detail == "a copy in 16 bits")
    assert copied == engine.budget.half_bytes
    assert sum(line.bytes for line in told) - copied == sum(storages.values())
    assert engine.budget.weight_bytes == sum(line.bytes for line in told)


def compressed(spec: ModelSpec, tokenizer: Tokenizer, folder: Path, recipe: Recipe, **given: Any) -> Path:
    """A random model of `spec`, as a hub has it in 16 bits, compressed by `recipe`."""
    (folder / "whole").mkdir()
    write_model(folder / "whole", random_model(spec), tokenizer, torch.bfloat16)
    job = CompressionJob(model=str(folder / "whole"), out=folder / "small", recipe=recipe, **given)
    compress(job, *SILENT)
    return folder / "small"


@sampled(4)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("spec", SPECS)
def test_weights_take_what_was_planned(spec: str, recipe: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    if (spec, recipe) in IMPOSSIBLE:
        pytest.skip("no file holds fused projections or experts so")
    assert_held_as_planned(compressed(SPECS[spec], tokenizer, tmp_path, RECIPES[recipe]))


@pytest.mark.parametrize("method", ["spqr", "smoothquant"])
def test_weights_of_methods_that_see_text(
    method: str, tokenizer: Tokenizer, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(method, static="minmax" if method == "smoothquant" else None)
    given: dict[str, Any] = {"data": (str(text),), "samples": 2, "length": 32, "cache": token_cache}
    assert_held_as_planned(compressed(WIDE, tokenizer, tmp_path, recipe, **given))


def test_factors(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    write_model(tmp_path / "whole", random_model(WIDE), tokenizer, torch.bfloat16)
    factorise(FactoringJob(model=str(tmp_path / "whole"), out=tmp_path / "small", method="svd", keep=0.5), *SILENT)
    assert_held_as_planned(tmp_path / "small")


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_other_layouts(layout: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    small = compressed(WIDE, tokenizer, tmp_path, RECIPES["int4"])
    convert(str(small), tmp_path / layout, layout)
    assert_held_as_planned(tmp_path / layout)


def test_shapes_that_a_cpu_reads() -> None:
    if code_order() is None:
        pytest.skip("this CPU's torch has no fast product with 4-bit codes")
    for bits in (2, 4, 8):
        for group in (0, 16, 32, 64, 96, 128, 256, 512):
            for outputs, inputs in ((64, 64), (96, 128), (128, 192), (192, 512), (64, 1024)):
                said = Scheme(bits=bits, group=group).is_read_by_cpus(outputs, inputs)
                assert said == takes_int4(outputs, inputs, bits, group), (bits, group, outputs, inputs)
