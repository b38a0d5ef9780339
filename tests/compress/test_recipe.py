"""Recipes in files: what cannot be read, and what a model settles of one."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.compress.test_compression import FAMILIES
from tests.jobs.test_load import alias_bomb
from tightfit.compress.cost import schemes
from tightfit.compress.fit.bit_choice import settled_for
from tightfit.compress.recipe import CALIBRATED, METHODS, OF_OPTION, USED, Recipe, Step, read_recipe, recipe_of
from tightfit.compress.rounding.rotation import rotated_spec
from tightfit.errors import UserError
from tightfit.models.quantized.matrices import matrices


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("- {method: foo}", "unknown; use one of rotate, .*, or alone structured, svd, whitened-svd"),
        ("- {method: svd}", "method svd is no step; use --method svd alone, and compress what it makes"),
        ("- {method: gtpq}", r"method 'gtpq' is unknown; did you mean gptq\?$"),
        ("- {method: 5}", "method 5 is unknown; use one of rotate, keep, rtn"),
        ("- {bits: 4}", "with a method"),
        ("- {method: gptq, bits: four}", "bits"),
        ("- {method: gptq, widht: 4}", "widht"),
        ("- {method: gptq}\n- {method: rotate}", "first step"),
        ("- {method: keep}", "quantizes"),
        ("5", "list of steps"),
        ("- {method: gptq, layers: 3}", "pattern"),
        ("- {method: smoothquant, bits: 4}", "bits is 4, but smoothquant has 8"),
        ("- {method: spqr, group: 64}", "group is 64, but spqr has 16"),
        ("- {method: llm.int8, symmetric: false}", "symmetric is False, but llm.int8 has True"),
        ("- {method: gptq, act_order: yes}", "act_order"),
        ("- {method: gptq, bits: 4.5}", "bits in .* is 4.5; it must be a whole number"),
        ("- {method: gptq, damping: much}", "damping in .* is 'much'; it must be a number such as 0.01"),
        ("- {method: gptq, damping: .nan}", "damping is nan; it lies between 0 and 1"),
        ("- {method: spqr, outlier_share: 0.5}", "outlier_share is 0.5; it is a share"),
        ("- {method: gptq, layers: []}", r"layers in .* is \[\]; it must be a pattern"),
        (f"- {{method: round, seed: {2**70}}}", rf"seed is {2**70}; it lies between 0 and"),
        ("- {method: rotate, seed: -1}\n- {method: rtn}", "seed is -1; it lies between 0 and"),
        ("- {method: rtn, pattern: '2:4'}", "pattern in .* is 2:4, but rtn does not use it; leave it out"),
        ("- {method: rtn, act_order: groups}", "act_order in .* is groups, but rtn does not use it"),
        ("- {method: keep, bits: 4}\n- {method: rtn}", "bits in .* is 4, but keep does not use it"),
        ("- {method: fp8, numbers: nf4}", "numbers in .* is nf4, but fp8 does not use it"),
        ("a: [", "not valid YAML"),
        ("- {method: gptq, method: rtn}", "twice"),
        ("- {method: !!timestamp x}", "'x' is no timestamp"),
        (f"- {{method: rtn, bits: {'9' * 5000}}}", "a number of 5,000 characters"),
        ("[" * 1500, "not valid YAML"),
        (alias_bomb(9), "aliases unfold to more than"),
    ],
)
def test_recipes_that_cannot_be(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(content)
    with pytest.raises(UserError, match=said):
        read_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("gtpq", r"method 'gtpq' is unknown; did you mean gptq\?$"),
        ("wanda+GPTQ", r"method 'GPTQ' is unknown; did you mean gptq\?$"),
        ("keep+rtn", "'keep' is unknown; use one of rotate, rtn, .*, or alone structured, svd, whitened-svd"),
        ("foo", "use one of rotate, rtn, gptq"),
    ],
)
def test_methods_that_the_option_does_not_take(method: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        recipe_of(method)


@pytest.mark.parametrize("method", METHODS)
def test_options_that_are_refused_change_nothing(method: str) -> None:
    """What a method is said not to use cannot change how it codes; what it uses is a field of a step."""
    assert set(USED[method]) <= {field.name for field in fields(Step)}
    plain = Step(method=method)  # type: ignore[arg-type]
    passed_over: dict[str, Any] = {"bits": 5, "group": 32, "symmetric": True, "numbers": "mxfp4", "activations": "int8"}
    for name, value in passed_over.items():
        if name not in USED[method]:
            assert replace(plain, **{name: value}).scheme() == plain.scheme(), name


def test_numbers_without_a_point_are_numbers(tmp_path: Path) -> None:
    """YAML takes 1e-3 for text."""
    (tmp_path / "recipe.yaml").write_text("- {method: gptq, damping: 1e-3}")
    assert read_recipe(tmp_path / "recipe.yaml").steps[0].damping == 1e-3


NAMES = tuple(matrices(FAMILIES["phi3"]))


@pytest.mark.parametrize(
    "steps",
    [
        [("rtn", "*.mlp.down"), ("gptq", "*")],
        [("gptq", "*"), ("awq", "*")],
        [("keep", "layers.0.*"), ("rtn", "*")],
        [("wanda", "*"), ("magnitude", "*"), ("gptq", "*")],
        [("gptq", "*.attention.*"), ("rtn", "layers.0.*"), ("rtn", "layers.1.*")],
    ],
)
def test_a_step_that_decides_nothing_is_refused(steps: list[tuple[Any, str]]) -> None:
    """Whoever takes the first step that names a layer for the one that decides would get other bits than asked for."""
    recipe = Recipe(tuple(Step(method=method, layers=(layers,)) for method, layers in steps))
    with pytest.raises(UserError, match=r"step 1 \(.*\) decides nothing, .*; put it after them, or drop it"):
        recipe.require_effect(NAMES)


@pytest.mark.parametrize(
    "steps",
    [
        [("gptq", "*"), ("rtn", "*.mlp.down"), ("keep", "layers.0.*")],
        [("rotate", "*"), ("wanda", "*"), ("gptq", "*")],
        [("wanda", "*"), ("keep", "layers.0.*"), ("gptq", "*")],
        [("gptq", "*"), ("wanda", "*")],
        [("gptq", "layers.0.*"), ("keep", "layers.1.*")],
    ],
)
def test_steps_that_decide_something(steps: list[tuple[Any, str]]) -> None:
    Recipe(tuple(Step(method=method, layers=(layers,)) for method, layers in steps)).require_effect(NAMES)


def test_groups_whose_scales_take_more_than_codes_save_are_refused() -> None:
    with pytest.raises(UserError, match=r"layers.0.attention.q in int4 g1 asym is no smaller than in 16 bits.*larger"):
        schemes(FAMILIES["phi3"], recipe_of("rtn", bits=4, group=1))
    assert schemes(FAMILIES["phi3"], recipe_of("rtn", bits=4, group=2))


def test_a_recipe_is_told_as_it_is_done() -> None:
    """Pruning comes first wherever its step stands, and rounded inputs are told of small floats too."""
    assert recipe_of("gptq+wanda").describe() == "wanda 50%, then gptq int4 g128 asym"
    assert recipe_of("fp8", activations="fp8").describe() == "fp8 (fp8 activations)"
    assert recipe_of("rotate+nf4").describe() == "rotate, then nf4"


def test_recipes_that_never_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="/dev/zero is a character device"):
        read_recipe(Path("/dev/zero"))
    with pytest.raises(UserError, match=r"cannot read recipe .*: Is a directory; give a YAML file of steps"):
        read_recipe(tmp_path)


@pytest.mark.parametrize(("symmetric", "wanted"), [(None, True), (True, True), (False, False)])
def test_codes_of_models_with_experts_are_symmetric_unless_said(symmetric: bool | None, wanted: bool) -> None:
    """Which transformers loads; other models, and numbers that have no choice, stay as they are."""
    step = settled_for(recipe_of("gptq", bits=4, symmetric=symmetric), FAMILIES["qwen3_moe"]).steps[0]
    assert step.symmetric is wanted
    assert settled_for(recipe_of("gptq", bits=4), FAMILIES["gemma2"]).steps[0].symmetric is None
    assert settled_for(recipe_of("spqr"), FAMILIES["qwen3_moe"]).steps == (Step(method="spqr"),)


@pytest.mark.parametrize(
    ("name", "said"), [("gpt2", "LayerNorm"), ("gemma2", "norms after"), ("deepseek_v3", "latent")]
)
def test_families_that_cannot_be_rotated(name: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"a {name} model has {said}.* cannot be rotated"):
        rotated_spec(FAMILIES[name])


def test_a_head_of_the_layers_width_is_coded_like_them() -> None:
    """So that formats with one scheme can hold both; in another width it has that one's defaults."""
    for bits, wanted in ((4, "int4 g64"), (8, "int8 per channel"), (2, "int2 g128 asym")):
        step = recipe_of("gptq", bits=4, group=64, symmetric=True, head=bits).coding("head")
        scheme = None if step is None else step.scheme()
        assert scheme is not None
        assert scheme.describe() == wanted
    assert recipe_of("fp8", head=8).describe() == "fp8, then rtn int8 per channel for head"


@pytest.mark.parametrize("method", OF_OPTION)
def test_a_head_beside_layers_whose_method_reads_text_is_coded_by_gptq(method: str) -> None:
    recipe = recipe_of(f"{method}+rtn" if method == "rotate" else method, head=8)
    step = recipe.coding("head")
    assert step is not None
    assert (step.method == "gptq") == any(each.method in CALIBRATED for each in recipe.steps[:-1])
    assert recipe.coding("layers.0.mlp.down") is not step
