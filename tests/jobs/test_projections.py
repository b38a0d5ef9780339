"""What adapter.targets means: PEFT's answer to the same text where PEFT takes it, and a sentence where nobody could."""

import re
from typing import Any

import pytest

from tests.models.huggingface.reference import pair
from tightfit.errors import UserError
from tightfit.jobs.adapter import AdapterTraining
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.projections import PROJECTIONS, targeted
from tightfit.jobs.rules.refusals import refused_by_trainer
from tightfit.jobs.rules.rule import Run
from tightfit.models.huggingface.families import FAMILIES
from tightfit.models.presets import preset

LLAMA, GPT2 = preset("tiny-llama"), preset("gpt2-xl")


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        (["q"], "q"),
        (["down", "v_proj", "q_proj"], "q v down"),
        (["self_attn.q_proj", "attention.k"], "q k"),
        ([r".*\.(q|v)_proj"], "q v"),
        ([r"model\.layers\.\d+\.mlp\..*"], "gate up down"),
        (["model.layers.*.mlp.*"], "gate up down"),
        (["*.o_proj"], "o"),
        ([f"model.layers.{layer}.self_attn.v_proj" for layer in range(LLAMA.layers)], "v"),
        ([".*self_attn.*", "layers.*.mlp.up"], "q k v o up"),
    ],
)
def test_names_globs_and_expressions(targets: list[str], wanted: str) -> None:
    assert targeted(targets, LLAMA) == tuple(wanted.split())
    assert AdapterTraining(rank=2, targets=targets).projections(LLAMA) == tuple(wanted.split())


def test_families_have_names_of_their_own() -> None:
    assert targeted(["c_attn"], GPT2) == ("q", "k", "v")
    assert targeted(["c_proj"], GPT2) == ("o", "down")
    assert targeted(["mlp.c_proj"], GPT2) == ("down",)
    phi = preset("phi-3-mini-4k")
    assert targeted(["qkv_proj"], phi) == ("q", "k", "v")
    assert targeted(["gate_up_proj", "o_proj"], phi) == ("o", "gate", "up")
    adapted = AdapterTraining(rank=2).adapted(spec=GPT2)
    assert adapted is not None
    assert adapted.projections == adapted.settings.projections(GPT2) == PROJECTIONS


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", ["q_proj"]),
        ("llama", ["c_proj"]),
        ("llama", r".*\.(o|down|c)_proj"),
        ("gemma2", ["self_attn.o_proj", "up_proj"]),
        ("gemma2", r"model\.layers\.\d\.mlp\.(gate|down)_proj"),
        ("gpt2", ["c_proj"]),
        ("gpt2", r".*attn\.c_.*"),
        ("gpt2", r".*\.(o|down)_proj"),
        ("phi3", ["qkv_proj", "mlp.down_proj"]),
    ],
)
def test_peft_means_the_same(name: str, targets: Any) -> None:
    """By PEFT's own answer for each of the model's modules; where it finds none, so do we."""
    peft = pytest.importorskip("peft")
    both = pair(name)
    spec, settings = both.ours.spec, AdapterTraining.model_validate({"rank": 2, "targets": targets})
    config = peft.LoraConfig(r=2, target_modules=targets)
    asked = peft.tuners.tuners_utils.check_target_module_exists
    chosen = [path for path, _ in both.theirs.named_modules() if asked(config, path)]
    if not chosen:
        with pytest.raises(UserError, match="is no projection of"):
            settings.projections(spec)
        return
    rules = [rule for rule in FAMILIES[spec.family].weights if holds(rule.theirs, chosen)]
    assert set(settings.projections(spec)) == {own.rpartition(".")[2] for rule in rules for own in rule.ours}


def holds(theirs: str, chosen: list[str]) -> bool:
    """Whether a family's module, whatever its layer's number, is among the chosen."""
    pattern = re.escape(theirs).replace(re.escape("{layer}"), r"\d+")
    return any(re.fullmatch(pattern, path) for path in chosen)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (
            ["q", "w.*"],
            r"adapter.targets has 'w.\*', which is no projection of llama; there are q, k, v, o, gate, up, down ",
        ),
        (["c_attn"], r"'c_attn', which is no projection of llama; .*model.layers.0.self_attn.q_proj"),
        (["(q_proj"], r"'\(q_proj', which is no projection"),
        (["model.layers.0.self_attn.q_proj"], "means q of layer 0 but not of layer 1; adapters are on a projection"),
        (["q", r".*\.1\..*v_proj"], "means v of layer 1 but not of layer 0"),
    ],
)
def test_what_means_nothing_is_a_sentence(targets: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        AdapterTraining(rank=2, targets=targets).projections(LLAMA)


def test_gates_that_are_not_there_are_told() -> None:
    with pytest.raises(UserError, match="'gate', which is no projection of gpt2; there are q, k, v, o, up, down "):
        AdapterTraining(rank=2, targets=["gate_proj"]).projections(GPT2)


@pytest.mark.parametrize("name", ["tiny-deepseek-v3", "tiny-mixtral"])
@pytest.mark.parametrize("targets", [["q", "v"], ["w.*"], ["q", "c_attn"]])
def test_layers_that_get_no_adapters_are_said_to_have_none(name: str, targets: list[str]) -> None:
    """Not that `v` is no projection of a family of which the same sentence lists `v`."""
    spec = preset(name)
    try:
        adapted = AdapterTraining.model_validate({"rank": 2, "targets": targets}).adapted(spec=spec)
        said = str(refused_by_trainer(Run(layout=Layout(), levers=Levers(), spec=spec, adapted=adapted)))
    except UserError as error:
        said = str(error)
        assert said.startswith(f"adapter.targets has '{targets[-1]}', but {spec.family} has ")
    assert f"{spec.family} has experts or latent attention" in said
    assert said.endswith("; choose another model")
    assert "projection" not in said


def test_one_text_is_a_list_of_one() -> None:
    assert AdapterTraining(rank=2, targets="q_proj").targets == ["q"]  # type: ignore[arg-type]
    assert AdapterTraining(rank=2, targets=["qkv_proj"]).targets == ["qkv_proj"]


def test_lists_that_mean_the_same_are_equal() -> None:
    """A run is resumed with the targets in another order, or one of them named twice."""
    one, other = (AdapterTraining(rank=2, targets=names) for names in (["v_proj", "q", "v"], ["q", "v"]))
    assert one == other
    patterns = [AdapterTraining(rank=2, targets=names) for names in (["*.up", "q", "*.k"], ["*.k", "*.up", "q"])]
    assert patterns[0] == patterns[1] != one
