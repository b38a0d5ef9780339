"""Recipes, families and layouts drawn at random: a sentence with nothing written, or what transformers computes too."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.compress.conftest import random_model
from tests.compress.test_compression import TOKENS, logits, run
from tests.compress.test_structured import spec_of, with_biases
from tests.compress.test_transformers import their_logits
from tests.models.huggingface.reference import CASES
from tightfit.compress.conversion import convert
from tightfit.compress.recipe import CODING, PRUNING, Recipe, Step
from tightfit.errors import UserError
from tightfit.models.loading import load_model
from tightfit.models.quantized.formats.registry import FORMATS
from tightfit.models.saving import export_model, write_model
from tightfit.models.text.tokenizer import Tokenizer

DRAWS = 40
SOME = ("*.attention.*", "*.mlp.*", "layers.0.*", "*.q", "*.o", "*.down", "*.experts.*")
"""Patterns of the steps after the first, which one for all layers would leave nothing to decide."""
FREE = ("rtn", "gptq", "round", "awq")
"""Methods whose numbers may be chosen."""
ROUNDED_INPUTS = ("smoothquant", "llm.int8")


def drawn_step(draw: Random, methods: tuple[str, ...], patterns: tuple[str, ...]) -> Step:
    method = draw.choice(methods)
    given: dict[str, Any] = {"method": method, "layers": (draw.choice(patterns),), "steps": 2}
    if method in FREE:
        given |= {"bits": draw.randint(2, 8), "group": draw.choice((0, 4, 8, -1))}
        given["symmetric"] = draw.choice((None, True, False))
    if method == "gptq":
        given["act_order"] = draw.choice(("none", "static", "groups"))
    if method in PRUNING:
        given["pattern"] = draw.choice((None, "2:4"))
    return Step(**given)


def drawn_recipe(draw: Random) -> Recipe:
    """A rotation, a pruning and one to three codings, each perhaps left out."""
    steps = [Step(method="rotate")] if draw.random() < 0.2 else []
    steps += [drawn_step(draw, PRUNING, ("*", *SOME))] if draw.random() < 0.3 else []
    codings = (*(method for method in CODING if method not in ROUNDED_INPUTS), *FREE)
    steps.append(drawn_step(draw, codings, ("*", "*", *SOME)))
    steps += [drawn_step(draw, (*codings, "keep"), SOME) for _ in range(draw.randint(0, 2))]
    return Recipe(tuple(steps))


def assert_near(found: torch.Tensor, wanted: torch.Tensor, rounding: float) -> None:
    assert float((found - wanted).norm()) <= rounding * float(wanted.norm())


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(DRAWS))
def test_drawn(seed: int, tokenizer: Tokenizer, text: Path, token_cache: Path, tmp_path: Path) -> None:
    draw = Random(seed)
    spec, recipe = spec_of(draw.choice([name for name in CASES if "beyond" not in name])), drawn_recipe(draw)
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", with_biases(random_model(spec)), tokenizer)
    small = tmp_path / "small"
    try:
        run(tmp_path / "model", small, recipe, text, token_cache, format=draw.choice((None, None, *FORMATS)))
    except UserError:
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        return
    packed = logits(small)
    with torch.no_grad():
        assert_near(packed, load_model(str(small), packed=False).model(TOKENS).logits, 1e-4)
    export_model(str(small), tmp_path / "plain", form="hf", dtype="fp32")
    assert_near(their_logits(tmp_path / "plain", torch.float32), packed, 1e-4)
    for form in FORMATS:
        try:
            convert(str(small), tmp_path / form, form)
        except UserError:
            assert not (tmp_path / form).exists()
        else:
            assert_near(logits(tmp_path / form), packed, 4 * torch.finfo(torch.float16).eps)  # of GPTQ's scales
