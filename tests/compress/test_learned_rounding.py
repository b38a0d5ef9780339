"""Learned rounding: where it begins, what it minimises, and that it is kept only where it is better."""

import pytest
import torch
from torch import Tensor

from tests.compress.conftest import SPEC, random_model
from tightfit.compress.calibration.observation import run_layer
from tightfit.compress.layer_compression import LayerResult, compress_layer
from tightfit.compress.recipe import recipe_of
from tightfit.compress.rounding import learned_rounding
from tightfit.compress.rounding.gptq import gptq
from tightfit.compress.rounding.learned_rounding import EDGE, LearnedMatrix
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.scheme import Scheme


def coded_by_gptq(scheme: Scheme) -> tuple[CodedWeight, Tensor]:
    torch.manual_seed(1)
    weight, x = torch.randn(24, 64), torch.randn(200, 64) @ torch.randn(64, 64)
    return gptq(weight, x.T @ x / len(x), scheme), weight


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [0, 16])
def test_it_begins_with_the_codes_of_gptq(symmetric: bool, group: int) -> None:
    coded, weight = coded_by_gptq(Scheme(bits=3, group=group, symmetric=symmetric))
    begun = LearnedMatrix.of(coded, weight)
    torch.testing.assert_close(begun.rounded(), coded.dequantize())
    made = begun.finished()
    assert torch.equal(made.codes, coded.codes)
    torch.testing.assert_close(made.scale, coded.scale)
    wanted = weight / coded.scale.repeat_interleave(64 // coded.scale.shape[1], dim=1)
    kept = begun.unrounded.detach() == wanted
    assert 0.2 < kept.float().mean() < 1  # weights that GPTQ rounded to their nearest code stay where they were
    assert bool(((wanted - wanted.round()).abs()[kept] <= EDGE).all())


def test_gradients_pass_the_rounding() -> None:
    """Against the same formula written out with a detached difference."""
    coded, weight = coded_by_gptq(Scheme(bits=4, group=16, symmetric=False))
    begun, toward = LearnedMatrix.of(coded, weight), torch.randn(24, 64)
    found = torch.autograd.grad((begun.rounded() * toward).sum(), [begun.unrounded, begun.factor])
    straight = begun.unrounded + (begun.unrounded.round() - begun.unrounded).detach()
    scale = (coded.scale * begun.factor).repeat_interleave(16, dim=1)
    wanted = torch.autograd.grad((straight * scale * toward).sum(), [begun.unrounded, begun.factor])
    torch.testing.assert_close(found, wanted)


def compressed(method: str, inputs: list[Tensor], **options: int) -> LayerResult:
    return compress_layer(
        random_model(SPEC), 0, recipe_of(method, bits=2, group=32, symmetric=False, **options), inputs
    )


def outputs(model: Decoder, x: Tensor) -> Tensor:
    with torch.no_grad():
        return run_layer(model, model.layers[0], x)  # type: ignore[arg-type]


def test_a_layer_is_closer_to_the_original_on_rows_it_has_not_seen() -> None:
    torch.manual_seed(0)
    rows = torch.randn(48, 64, SPEC.hidden_size) @ torch.randn(SPEC.hidden_size, SPEC.hidden_size) / 8
    inputs, held = list(rows[:40].split(20)), rows[40:]
    wanted = outputs(random_model(SPEC), held)
    errors = {}
    for method, options in (("gptq", {}), ("round", {"steps": 30})):
        model = random_model(SPEC)
        compress_layer(model, 0, recipe_of(method, bits=4, group=32, symmetric=False, **options), inputs)
        errors[method] = float((outputs(model, held) - wanted).square().sum())
    assert errors["round"] < 0.99 * errors["gptq"], errors


def test_a_layer_makes_up_for_those_before_it() -> None:
    """Inputs that lost a tenth of themselves; the outputs are those of the whole ones."""
    torch.manual_seed(0)
    rows = torch.randn(28, 64, SPEC.hidden_size) @ torch.randn(SPEC.hidden_size, SPEC.hidden_size) / 8
    whole, held = list(rows[:20].split(10)), rows[20:]
    less = [0.9 * x for x in whole]
    wanted = outputs(random_model(SPEC), held)
    recipe = recipe_of("round", bits=4, group=32, symmetric=False, steps=15)
    errors = []
    for original in ([], whole):
        model = random_model(SPEC)
        compress_layer(model, 0, recipe, less, original=original)
        errors.append(float((outputs(model, 0.9 * held) - wanted).square().sum()))
    assert errors[1] < 0.99 * errors[0], errors


def test_codes_that_came_out_worse_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 64, SPEC.hidden_size)]
    wanted = compressed("gptq", inputs)
    monkeypatch.setattr(learned_rounding, "RATES", (100.0, 50.0))
    made = compressed("round", inputs, steps=2)
    assert made.layer_error == wanted.layer_error
    for name, coded in wanted.coded.items():
        assert torch.equal(made.coded[name].codes, coded.codes)


def test_the_same_seed_learns_the_same() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(4, 64, SPEC.hidden_size)]
    first, second = (compressed("round", inputs, steps=5) for _ in range(2))
    assert first.layer_error == second.layer_error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"numbers": "nf4"}, "integers"),
        ({"bits": 8, "group": 0, "activations": "int8"}, "activations"),
        ({"act_order": "groups"}, "plain groups"),
        ({"steps": 0}, "at least one"),
    ],
)
def test_what_it_does_not_go_with(options: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        recipe_of("round", **options)
