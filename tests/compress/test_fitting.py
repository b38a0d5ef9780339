"""Bits by layer: what is measured, what is chosen within a budget, and that sizes are what was said."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.compress.conftest import SPEC, random_model
from tests.compress.held import assert_held_as_said
from tests.compress.test_compression import FAMILIES
from tests.compress.whole_model import divergence, predictions, rounded_to, whole_sensitivities
from tests.covering import sampled
from tightfit.compress.compression import CompressionJob, compress
from tightfit.compress.cost import CompressionCost, predict
from tightfit.compress.fit.bit_choice import (
    LEAST_WIDTHS,
    BitChoice,
    Option,
    choose_bits,
    group_of,
    options_of,
    plain_bytes,
    recipe_for,
    uniform_bytes,
    unit_bytes,
    units,
)
from tightfit.compress.fit.fitting import Fit, best_mix, describe_measuring, fit_bits, fit_ledger, weight_budget_bytes
from tightfit.compress.fit.measuring_memory import measuring_ledger
from tightfit.compress.fit.sensitivity import measure_sensitivities
from tightfit.compress.model_parts import ModelParts
from tightfit.compress.recipe import Recipe, recipe_of
from tightfit.errors import UserError
from tightfit.hardware.machine import Machine, parse_machine
from tightfit.models.decoder import Decoder
from tightfit.models.loading import load_model
from tightfit.models.presets import preset
from tightfit.models.saving import write_model
from tightfit.models.text.tokenizer import Tokenizer


def sized(card_bytes: int) -> Machine:
    machine = parse_machine("T4")
    return replace(machine, accelerator=replace(machine.accelerator, usable_gib=card_bytes / 2**30))


def test_choices_against_all_there_are() -> None:
    """Of three units with four options each, at every budget: within it, near the best, no worse than one width."""
    one = replace(SPEC, layers=1, mlp_size=64)
    names = list(units(one))[:3]
    losses = {names[0]: (0.0, 0.01, 0.2, 3.0), names[1]: (0.0, 0.002, 0.01, 0.05), names[2]: (0.0, 0.1, 0.15, 0.9)}
    sizes = {names[0]: (160, 80, 40, 20), names[1]: (320, 160, 80, 40), names[2]: (80, 40, 20, 10)}
    options = {
        unit: [
            Option(bits, size, loss) for bits, size, loss in zip((16, 8, 4, 2), sizes[unit], losses[unit], strict=True)
        ]
        for unit in names
    }
    fixed = plain_bytes(one)
    every = list(product(*options.values()))
    for room in range(70, 570, 10):
        chosen = choose_bits(one, options, fixed + room)
        fitting = [each for each in every if sum(option.bytes for option in each) <= room]
        best = min(sum(option.loss for option in each) for each in fitting)
        assert chosen.bytes <= fixed + room
        largest_step = max(loss for unit in names for loss in losses[unit][:3])
        assert best <= chosen.loss <= best + largest_step
        for width in range(4):
            uniform = [options[unit][width] for unit in names]
            if sum(option.bytes for option in uniform) <= room:
                assert chosen.loss <= sum(option.loss for option in uniform)
    with pytest.raises(UserError, match="even at 2 bits"):
        choose_bits(one, options, fixed + 60)


UNTIED = replace(SPEC, tied=False)


def untied_model() -> Decoder:
    """Tied, a random model is all but certain of the token it has just read."""
    model = random_model(UNTIED)
    with torch.no_grad():
        model.get_parameter("norm.weight").mul_(3)
    return model


@pytest.fixture(scope="session")
def untied(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its directory."""
    folder = tmp_path_factory.mktemp("untied")
    write_model(folder, untied_model(), tokenizer)
    return folder


def drawn_rows(count: int, length: int) -> list[Tensor]:
    return [torch.randint(0, 250, (1, length), generator=torch.Generator().manual_seed(i)) for i in range(count)]


def test_sensitivities_say_which_layers_matter(untied: Path) -> None:
    """Every unit rounded alone, beside its estimate; and all of them together, which the estimates add up to."""
    spec, model, rows = UNTIED, untied_model(), drawn_rows(16, 64)
    group = group_of(spec)
    assert group == 64
    found = measure_sensitivities(ModelParts(str(untied), torch.device("cpu")), rows, group, widths=(3, 4))
    reference = predictions(model, rows)
    every = units(spec)
    predicted, measured = [], []
    for unit in every:
        bits = {name: 4 if name == unit else 16 for name in every}
        with rounded_to(model, bits, group):
            measured.append(divergence(model, rows, reference))
        predicted.append(found.losses[unit][4])
    for estimate, truth in zip(predicted, measured, strict=True):
        assert 0.6 < estimate / truth < 1.7
    assert float(torch.corrcoef(torch.tensor([predicted, measured]))[0, 1]) > 0.8
    assert sum(each[3] for each in found.losses.values()) == pytest.approx(found.uniform[3])
    assert found.uniform[3] > found.uniform[4] > 0


@sampled(3)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_layer_by_layer_is_what_the_whole_model_gives(family: str, tmp_path: Path) -> None:
    """Untied and tied ends, windows, capped logits, scaled embeddings, biases, learned positions."""
    spec = replace(UNTIED, layers=3) if family == "llama" else FAMILIES[family]
    model, rows, group, widths = random_model(spec), drawn_rows(3, 24), group_of(spec), (2, 4, 8)
    write_model(tmp_path, model, None)
    found = measure_sensitivities(ModelParts(str(tmp_path), torch.device("cpu")), rows, group, widths=widths)
    whole = whole_sensitivities(model, rows, widths, group)
    assert found.losses.keys() == whole.keys()
    for unit, losses in whole.items():
        assert found.losses[unit] == pytest.approx(losses, rel=1e-3)


def test_what_measuring_holds_is_told() -> None:
    """Of Llama 3.1 8B by hand: 64 MiB for the inputs of each layer, what is behind the last and behind five widths; a
    layer of 218,112,000 weights, 218,103,808 of them in matrices, and three copies of one of 4096 x 14336; at its
    fullest the gradients as well, the output projection of 128,256 tokens, and five times logits of 256 tokens."""
    ledger = measuring_ledger(preset("llama-3.1-8b"), 128, 2048, 5)
    layer_bytes = 4 * (218_112_000 + 218_103_808 + 3 * 4096 * 14336)
    assert ledger.allocated_bytes("evaluation") == (32 + 1 + 5) * 2**26 + layer_bytes
    assert ledger.allocated_bytes("backward") == (32 + 2) * 2**26 + layer_bytes
    fullest_bytes = (32 + 2 + 5) * 2**26 + 4 * 128_256 * (4096 + 5 * 256)
    assert ledger.peak_allocated_bytes() == ledger.allocated_bytes("loss") == fullest_bytes
    assert f"about {fullest_bytes / 2**30:.2f} GiB" in describe_measuring(ledger)


def test_no_budget_is_overrun_and_no_one_width_is_better(untied: Path) -> None:
    """Random budgets of a tiny model: within each, and no worse than any one width that fits, measured on the rows."""
    model, chance, rows = untied_model(), Random(0), drawn_rows(4, 32)
    group, parts = group_of(UNTIED), ModelParts(str(untied), torch.device("cpu"))
    found, reference = measure_sensitivities(parts, rows, group, widths=LEAST_WIDTHS), predictions(model, rows)
    least, most = uniform_bytes(UNTIED, 2, group), uniform_bytes(UNTIED, 8, group)
    for budget in (least, *(chance.randint(least, most) for _ in range(12)), most):
        chosen = best_mix(parts, rows, found, group, budget)
        assert chosen.bytes <= budget
        assert chosen.bytes == plain_bytes(UNTIED) + sum(
            unit_bytes(UNTIED, names, chosen.bits[unit], group) for unit, names in units(UNTIED).items()
        )
        with rounded_to(model, chosen.bits, group):
            assert chosen.loss == pytest.approx(divergence(model, rows, reference), rel=1e-3)
        for bits in LEAST_WIDTHS:
            if uniform_bytes(UNTIED, bits, group) <= budget:
                assert chosen.loss <= found.uniform[bits]


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_estimates_that_mislead_do_not_decide(method: str, untied: Path) -> None:
    """A mix that gives bits to those who need none is measured, and one width for all is taken."""
    rows, group, parts = drawn_rows(4, 32), group_of(UNTIED), ModelParts(str(untied), torch.device("cpu"))
    found = measure_sensitivities(parts, rows, group, widths=(3, 4, 8))
    worst = max(found.losses, key=lambda unit: found.losses[unit][3])
    wrong = {unit: dict.fromkeys((3, 4, 8), 0.0) if unit == worst else each for unit, each in found.losses.items()}
    budget = uniform_bytes(UNTIED, 4, group)
    assert choose_bits(UNTIED, options_of(UNTIED, wrong, group), budget).bits[worst] == 3
    misled = best_mix(parts, rows, replace(found, losses=wrong), group, budget, method)
    assert misled.bits == dict.fromkeys(units(UNTIED), 4)


def test_random_options_and_budgets() -> None:
    """Losses that fall with bits in any way: within the budget, and no worse than one width for all."""
    chance = Random(1)
    one = replace(SPEC, layers=1, mlp_size=64)
    group = group_of(one)
    for _ in range(200):
        worst = {unit: chance.random() ** 4 for unit in units(one)}
        falls = {unit: sorted((chance.random() for _ in LEAST_WIDTHS), reverse=True) for unit in units(one)}
        losses = {unit: dict(zip(LEAST_WIDTHS, (worst[unit] * f for f in falls[unit]), strict=True)) for unit in worst}
        options = options_of(one, losses, group)
        budget = chance.randint(uniform_bytes(one, 2, group), 2 * one.params())
        chosen = choose_bits(one, options, budget)
        assert chosen.bytes <= budget
        for bits in LEAST_WIDTHS:
            if uniform_bytes(one, bits, group) <= budget:
                assert chosen.loss <= sum(each[bits] for each in losses.values()) + 1e-12


@pytest.fixture
def fitted(untied: Path, text: Path, token_cache: Path, tmp_path: Path) -> tuple[CompressionJob, Fit]:
    """A tiny model that is sure of something on a card with room for about 4.5 bits a weight."""
    job = CompressionJob(
        model=str(untied),
        out=tmp_path / "small",
        recipe=Recipe(()),
        data=(str(text),),
        samples=4,
        length=64,
        cache=token_cache,
    )
    wanted = (uniform_bytes(UNTIED, 4, 64) + uniform_bytes(UNTIED, 5, 64)) // 2
    machine = sized(fit_ledger(UNTIED, wanted, 100).peak_bytes())
    return job, fit_bits(job, machine, 100, "gptq")


def test_a_model_that_fits_its_card(fitted: tuple[CompressionJob, Fit]) -> None:
    job, found = fitted
    assert found.ledger.peak_bytes() <= found.card_bytes
    assert len(set(found.choice.bits.values())) > 1
    assert found.choice.bytes <= weight_budget_bytes(UNTIED, found.card_bytes, 100)
    said: list[CompressionCost] = []
    fitting = replace(job, recipe=found.recipe, measuring=found.measuring)
    report = compress(fitting, said.append, lambda done, total, layer: None)
    assert report.measured.kl == pytest.approx(found.choice.loss, rel=0.02)
    recipe = recipe_of("gptq", bits=4, group=64)  # the widest for all that fits
    uniform = replace(job, recipe=recipe, out=job.out.with_name("uniform"))
    report = compress(uniform, lambda cost: None, lambda done, total, layer: None)
    assert report.measured.kl is not None
    assert found.choice.loss < 1.02 * report.measured.kl
    assert said[0].ledger is not None
    assert said[0].memory_bytes >= said[0].ledger.allocated_bytes("backward") > 0  # of measuring
    assert assert_held_as_said(job.out).total_bytes == found.choice.bytes
    stored = sum(
        t.nbytes for file in job.out.glob("*.safetensors") for n, t in load_file(file).items() if "shape" not in n
    )
    assert stored == predict(UNTIED, found.recipe, 4, 64).result_bytes
    model = load_model(str(job.out)).model
    named = {name: unit for unit, names in units(UNTIED).items() for name in names}
    for name, unit in named.items():
        bits = found.choice.bits[unit]
        module = model.get_submodule(name)
        assert getattr(getattr(module, "scheme", None), "bits", 16) == bits


@sampled(3)
@pytest.mark.parametrize("bits", LEAST_WIDTHS)
def test_estimates_are_of_what_rounding_to_nearest_does(bits: int, untied: Path, tmp_path: Path) -> None:
    """All layers at one width, as `--fit --method rtn` measures them and as the directory then has them."""
    chosen = BitChoice(dict.fromkeys(units(UNTIED), bits), 0, 0.0)
    job = CompressionJob(model=str(untied), out=tmp_path / "small", recipe=recipe_for(UNTIED, chosen, 64, "rtn"))
    compress(job, lambda cost: None, lambda done, total, layer: None)
    made = load_model(str(tmp_path / "small"), packed=False).model
    original = load_model(str(untied)).model
    with rounded_to(original, chosen.bits, 64):
        for name in (name for names in units(UNTIED).values() for name in names):
            assert torch.equal(made.get_parameter(f"{name}.weight"), original.get_parameter(f"{name}.weight")), name


def test_what_is_refused(
    tiny: Path, text: Path, tokenizer: Tokenizer, token_cache: Path, tmp_path: Path, fitted: tuple[CompressionJob, Fit]
) -> None:
    job, said = fitted[0], list[str]()
    with pytest.raises(UserError, match="even at 2 bits"):
        fit_bits(job, sized(fit_ledger(UNTIED, 1000, 100).peak_bytes()), 100, "gptq", said.append)
    assert said == []  # before hours of measuring
    with pytest.raises(UserError, match="not for --method awq"):
        fit_bits(job, parse_machine("T4"), 100, "awq")
    with pytest.raises(UserError, match="mixes widths, which gptq cannot hold; use --format compressed-tensors"):
        fit_bits(replace(job, format="gptq"), parse_machine("T4"), 100, "gptq")
    with pytest.raises(UserError, match="128 positions"):
        fit_bits(job, parse_machine("T4"), 1000, "gptq")
    with pytest.raises(UserError, match="in 16 bits already"):
        fit_bits(job, parse_machine("T4"), 100, "gptq")
    (tmp_path / "routed").mkdir()
    write_model(tmp_path / "routed", random_model(FAMILIES["qwen3_moe"]), tokenizer)
    with pytest.raises(UserError, match="experts"):
        fit_bits(replace(job, model=str(tmp_path / "routed")), parse_machine("T4"), 100, "gptq")


@pytest.mark.thorough
def test_a_choice_is_kept_for_a_run_that_was_killed(fitted: tuple[CompressionJob, Fit], text: Path) -> None:
    """Bits are not measured again for the same weights, rows and bytes; a damaged file is no choice."""
    job, found = fitted
    machine = replace(sized(0), accelerator=replace(sized(0).accelerator, usable_gib=found.card_bytes / 2**30))
    said: list[str] = []
    found = replace(found, measuring=None)
    assert fit_bits(job, machine, 100, "gptq", said.append) == found
    [line] = said
    assert line.startswith("bits were chosen by an earlier run: ")
    kept = Path(line.removeprefix("bits were chosen by an earlier run: "))
    for content in ("{", '{"bits": {}, "bytes": 1, "loss": 0}', kept.read_text().replace("loss", "lost")):
        kept.write_text(content)
        assert replace(fit_bits(job, machine, 100, "gptq", said.append), measuring=None) == found
        assert "how sensitive layers are" in said[1]
        del said[1:]
    assert fit_bits(replace(job, samples=3), machine, 100, "gptq", said.append)
    assert "how sensitive layers are" in said[1]


def test_several_cards_hold_a_copy_each(fitted: tuple[CompressionJob, Fit]) -> None:
    assert "cards serves a copy" not in fitted[1].describe(parse_machine("T4"))
    assert fitted[1].describe(parse_machine("2xT4")).endswith("; each of the 2 cards serves a copy")
