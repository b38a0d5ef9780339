"""Static activations: one scale a layer by every rule, stored, run, resumed and read back; beside plain arithmetic."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cli.conftest import Run
from tests.compress.conftest import SPEC
from tests.compress.held import assert_held_as_said
from tests.compress.test_compression import TOKENS, logits, run
from tests.covering import covering, sampled
from tightfit.compress.calibration.activation_scales import activation_scale, scale_of_inputs
from tightfit.compress.calibration.inputs import InputStatistics
from tightfit.compress.compression import CompressionJob, compress
from tightfit.compress.cost import schemes
from tightfit.compress.recipe import Recipe, Step, recipe_of
from tightfit.errors import UserError
from tightfit.kernels.quantized.rounded_linear import CODES, rounded_linear, rounded_values
from tightfit.models.loading import load_model
from tightfit.models.presets import preset
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.quantized.ranges import RULES, fit_grid
from tightfit.models.quantized.scheme import Scheme

INT8 = Scheme(bits=8, group=0, activations="int8", static=True)
FP8 = Scheme(kind="fp8", bits=8, group=0, activations="fp8", static=True)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"smoothquant {rule}": ("smoothquant", {"static": rule}) for rule in RULES},
    "rtn per tensor": ("rtn", {"bits": 8, "group": -1, "activations": "int8", "static": "minmax"}),
    "gptq": ("gptq", {"bits": 8, "activations": "int8", "static": "mse"}),
    "fp8 minmax": ("fp8", {"activations": "fp8", "static": "minmax"}),
    "fp8 mse": ("fp8", {"activations": "fp8", "static": "mse"}),
}


def heavy_tailed(rows: int = 400, columns: int = 32) -> Tensor:
    """Mostly small numbers, and a few large ones."""
    made = torch.Generator().manual_seed(3)
    x = torch.randn(rows, columns, generator=made)
    return x * (1 + 30 * (torch.rand(rows, columns, generator=made) > 0.9995))


def by_hand(x: Tensor, scale: float, scheme: Scheme) -> Tensor:
    """Numbers rounded to multiples of the scale, or to 8-bit floats of it, one formula a line."""
    if scheme.activations == "fp8":
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return torch.clamp(torch.round(x / scale), -128, 127) * scale


@pytest.mark.parametrize("scheme", [INT8, FP8], ids=["int8", "fp8"])
def test_min_max_covers_all_and_mse_has_the_least_error(scheme: Scheme) -> None:
    """Of all scales on a fine grid; the search's own steps are 2.5 % of the range."""
    x = heavy_tailed()
    most = float(x.abs().max())
    end = 448.0 if scheme.activations == "fp8" else 127.5
    assert float(scale_of_inputs(x, x.abs().max(), scheme, "minmax")) == pytest.approx(most / end)
    found = float(scale_of_inputs(x, x.abs().max(), scheme, "mse"))
    tried = {ratio: most / end * ratio for ratio in torch.linspace(0.35, 1.05, 200).tolist()}
    errors = {ratio: float((by_hand(x, scale, scheme) - x).square().sum()) for ratio, scale in tried.items()}
    own = float((by_hand(x, found, scheme) - x).square().sum())
    assert own <= 1.02 * min(errors.values())
    assert own <= float((by_hand(x, most / end, scheme) - x).square().sum())


def test_a_percentile_and_kl_leave_outliers_out() -> None:
    x = heavy_tailed()
    most = x.abs().max()
    ends = {rule: 127.5 * float(scale_of_inputs(x, most, INT8, rule)) for rule in RULES}
    quantiles = torch.quantile(x.flatten(), torch.tensor([0.001, 0.999]))
    assert ends["percentile"] == pytest.approx(float(quantiles.abs().max()), rel=1e-4)
    assert ends["percentile"] < ends["kl"] < ends["minmax"] == pytest.approx(float(most), rel=1e-6)


def test_what_was_seen_and_not_sampled_is_in_range() -> None:
    """Of many batches the sample has some rows; the largest number is that of all."""
    seen = InputStatistics(16, torch.device("cpu"))
    for index in range(40):
        rows = torch.randn(200, 16, generator=torch.Generator().manual_seed(index))
        rows[101, 5] *= 1 + 20 * (index == 17)
        seen.add(rows)
    assert float(seen.sample.abs().max()) < float(seen.largest.max())
    assert float(activation_scale(seen, INT8, "minmax")) == pytest.approx(float(seen.largest.max()) / 127.5)


@pytest.mark.parametrize("scheme", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_layer_computes_what_its_codes_mean(scheme: Scheme, rows: int) -> None:
    """Inputs beyond the range saturate, and a row is the same in any company."""
    x, weight = 3 * heavy_tailed(rows, 64), 0.1 * torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    coded = fit_grid(weight, scheme).code(weight)
    scale = torch.tensor([0.01 if scheme is INT8 else 0.002])
    layer = QuantizedLinear(type(coded)(**{**vars(coded), "input_scale": scale}))
    wanted = by_hand(x, float(scale), scheme) @ coded.dequantize().T
    assert float((by_hand(x, float(scale), scheme) - x).abs().max()) > 1 or rows == 1
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        rounded_values(x, CODES[scheme.activations or ""], scale), by_hand(x, float(scale), scheme)
    )
    torch.testing.assert_close(layer(x[:1]), layer(x)[:1], rtol=1e-6, atol=1e-6)


def test_a_scale_for_the_whole_matrix_rounds_inputs_too() -> None:
    x, weight = heavy_tailed(5, 64), torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    whole = fit_grid(weight, Scheme(bits=8, group=-1, activations="int8"))
    coded = whole.code(weight)
    wanted = rounded_values(x, torch.int8) @ coded.dequantize().T
    torch.testing.assert_close(QuantizedLinear(coded)(x), wanted, rtol=1e-5, atol=1e-5)
    assert float((wanted - x @ coded.dequantize().T).abs().max()) > 1e-3


@sampled(3)
@pytest.mark.parametrize("name", covering(CASES))
def test_calibrated_stored_and_run(name: str, tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    """Beside the same codes with inputs rounded by hand, as the files' scales say."""
    method, options = CASES[name]
    run(tiny, tmp_path / "small", recipe_of(method, **options), text, token_cache)
    held = assert_held_as_said(tmp_path / "small")
    assert "static" in held.description
    model = load_model(str(tmp_path / "small")).model
    layers = {path: module for path, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(layers) == 7 * SPEC.layers
    assert all(layer.scheme.static and layer.input_scale is not None for layer in layers.values())
    made = logits(tmp_path / "small")
    wanted = logits(tiny)
    error = float((made - wanted).square().mean() / wanted.square().mean())
    assert error < 0.05, error
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for path, layer in layers.items():
        layer.register_forward_hook(lambda _, x, y, path=path: seen.update({path: (x[0], y)}))
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, made)
    # Each layer by itself: of inputs that differ in the last bit, some are rounded to another code.
    for path, (x, y) in seen.items():
        layer = layers[path]
        by_codes = by_hand(x, float(layer.input_scale), layer.scheme) @ layer.dequantize(torch.float32).T  # type: ignore[arg-type]
        torch.testing.assert_close(y, by_codes, rtol=1e-5, atol=1e-5)
    assert seen.keys() == layers.keys()


def test_projections_of_one_input_have_one_scale(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path / "small", recipe_of("smoothquant", static="mse"), text, token_cache)
    attention: Any = load_model(str(tmp_path / "small")).model.layers[0].attention
    assert float(attention.q.input_scale) == float(attention.k.input_scale) == float(attention.v.input_scale)
    assert float(attention.q.input_scale) != float(attention.o.input_scale)


def test_a_killed_run_goes_on_with_its_scales(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    recipe = recipe_of("smoothquant", static="percentile")
    run(tiny, tmp_path / "whole", recipe, text, token_cache)

    def killed(done: int, total: int, layer: object) -> None:
        raise KeyboardInterrupt

    job = CompressionJob(
        model=str(tiny),
        out=tmp_path / "parts",
        recipe=recipe,
        data=(str(text),),
        samples=8,
        length=64,
        cache=token_cache,
    )
    with pytest.raises(KeyboardInterrupt):
        compress(job, lambda cost: None, killed)
    assert compress(job, lambda cost: None, lambda *_: None).resumed_layers == 1
    for whole in sorted((tmp_path / "whole").glob("*.safetensors")):
        one, other = load_file(whole), load_file(tmp_path / "parts" / whole.name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key].float(), other[key].float()) for key in one)


def test_static_scales_need_text_and_rounded_inputs(tiny: Path, tmp_path: Path) -> None:
    recipe = recipe_of("fp8", activations="fp8", static="mse")
    job = CompressionJob(model=str(tiny), out=tmp_path / "x", recipe=recipe, samples=2, length=16, cache=tmp_path)
    said = compress(job, lambda cost: None, lambda *_: None).predicted.calibration
    assert said.startswith("2 × 16 tokens of the model's own text")
    for method, options in {"gptq": {"bits": 4}, "fp8": {}, "llm.int8": {}, "spqr": {}}.items():
        with pytest.raises(UserError, match="static scales are for int8 and fp8 activations, but these are"):
            recipe_of(method, static="minmax", **options)
    with pytest.raises(UserError, match=r"activations are int8, beside weights of bits 4, group 32.*bits 8, group 0"):
        Scheme(bits=4, group=32, activations="int8")
    experts = preset("tiny-qwen3-moe")
    with pytest.raises(UserError, match=r"layers.0.mlp.experts.(gate|up|down) cannot round inputs statically"):
        schemes(experts, Recipe((Step(method="smoothquant", static="kl"),)))


def test_damaged_scales_are_a_sentence(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path / "small", recipe_of("smoothquant", static="minmax"), text, token_cache)
    shards = sorted((tmp_path / "small").glob("*.safetensors"))
    shard = next(path for path in shards if any(key.endswith("input_scale") for key in load_file(path)))
    tensors = load_file(shard)
    name = next(key for key in tensors if key.endswith("input_scale"))
    module = name.removesuffix(".input_scale")
    for changed, said in (
        ({name: torch.tensor([0.0])}, "no number above 0"),
        ({name: torch.tensor([float("nan")])}, "no number above 0"),
        ({name: torch.ones(2)}, "no number above 0"),
        ({f"{module}.input_zero_point": torch.tensor([3], dtype=torch.int8)}, "have a zero point"),
        ({name: None}, f"{module} has no input_scale"),
    ):
        bad = tmp_path / "bad"
        shutil.copytree(tmp_path / "small", bad)
        (bad / "checksums.json").unlink(missing_ok=True)
        made = {key: tensor for key, tensor in (tensors | changed).items() if tensor is not None}
        save_file(made, bad / shard.name)
        listed = bad / "model.safetensors.index.json"
        index = json.loads(listed.read_text())
        index["weight_map"] |= dict.fromkeys(made, shard.name)
        for key in set(tensors) - set(made):
            del index["weight_map"][key]
        listed.write_text(json.dumps(index))
        with pytest.raises(UserError, match=said):
            load_model(str(bad))
        shutil.rmtree(bad)


@sampled(2)
@pytest.mark.parametrize(
    "changes", [{"strategy": "token"}, {"symmetric": False}, {"num_bits": 4}, {"dynamic": "local"}, {"type": "x"}]
)
def test_other_ways_of_rounding_are_named(
    changes: dict[str, Any], tiny: Path, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    run(tiny, tmp_path / "small", recipe_of("smoothquant", static="minmax"), text, token_cache)
    path = tmp_path / "small/config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] |= changes
    path.write_text(json.dumps(config))
    said = rf"rounds activations by .*{next(iter(changes))}.*dynamic ones a token or static"
    with pytest.raises(UserError, match=said):
        load_model(str(tmp_path / "small"))


def test_the_command_line_asks_for_it(
    tiny: Path,
    text: Path,
    token_cache: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ("--method", "fp8", "--activations", "fp8", "--static", "mse", "--samples", "4", "--seq", "64", "--json")
    places = ("--data", str(text), "--cache", str(token_cache), "--out", str(tmp_path / "small"))
    made = Run(capfd, monkeypatch, "compress", str(tiny), *words, *places)
    assert made.code == 0, made.err
    config = json.loads((tmp_path / "small/config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert config["input_activations"] == {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    }


def test_the_product_of_integers_by_a_known_scale() -> None:
    x, codes = heavy_tailed(9, 32), torch.randint(-128, 128, (16, 32), dtype=torch.int8)
    scale, known = torch.rand(16, 1), torch.tensor([0.02])
    wanted = by_hand(x, 0.02, INT8).double() @ (codes.double() * scale.double()).T
    torch.testing.assert_close(rounded_linear(x, codes, scale, known).double(), wanted, rtol=1e-5, atol=1e-4)
