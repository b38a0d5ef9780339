"""Recipes in files: what cannot be read, and what a model settles of one."""

from pathlib import Path

import pytest

from tests.compress.test_compression import FAMILIES
from tests.jobs.test_load import alias_bomb
from tightfit.compress.bit_choice import settled_for
from tightfit.compress.recipe import Step, read_recipe, recipe_of
from tightfit.compress.rotation import rotated_spec
from tightfit.errors import UserError


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("- {method: foo}", "unknown"),
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
