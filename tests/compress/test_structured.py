"""Smaller models by structured pruning: what is cut, what makes up for it, and what transformers computes from it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compress.conftest import SPEC, random_model
from tests.compress.test_compression import FAMILIES, logits
from tests.compress.test_transformers import their_logits
from tests.covering import sampled
from tests.models.huggingface.reference import CASES as CONFIGS
from tightfit.compress.calibration.observation import layer_of
from tightfit.compress.report import CompressionReport
from tightfit.compress.structure.narrowing import NarrowingJob, narrow
from tightfit.compress.structure.structured import (
    KeptShape,
    best_experts,
    block_influence,
    cut_layer,
    refit,
    routed_weight,
)
from tightfit.errors import UserError
from tightfit.kernels.experts.routed_mlp import Routing
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.config import spec_from_config
from tightfit.models.loading import load_model
from tightfit.models.saving import write_model
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import Tokenizer


def cut(model: Path, out: Path, kept: KeptShape, text: Path, cache: Path) -> CompressionReport:
    job = NarrowingJob(model=str(model), out=out, kept=kept, data=(str(text),), samples=8, length=64, cache=cache)
    return narrow(job, lambda cost: None, lambda done, total, layer: None)


def test_refit_is_least_squares() -> None:
    """Against lstsq on the inputs themselves, and no other columns of the same places do better."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(300, 24, generator=generator, dtype=torch.float64)
    x[:, 12:] += x[:, :12] * 0.7
    weight = torch.randn(5, 24, generator=generator, dtype=torch.float64)
    kept = torch.tensor([0, 2, 3, 7, 11, 15, 20, 23])
    wanted = torch.linalg.lstsq(x[:, kept], x @ weight.T).solution.T
    torch.testing.assert_close(refit(weight, x.T @ x / 300, kept), wanted, rtol=2e-3, atol=2e-3)


def test_influence() -> None:
    x = torch.randn(2, 5, 8)
    assert block_influence([x], [3 * x]) == pytest.approx(0, abs=1e-12)
    assert block_influence([x], [-x]) == pytest.approx(2)


def spec_of(name: str) -> ModelSpec:
    return spec_from_config(CONFIGS[name] | {"vocab_size": SPEC.vocab_size, "max_position_embeddings": 128}, name)


CASES: dict[str, tuple[ModelSpec, KeptShape]] = {
    "layers": (SPEC, KeptShape(layers=1)),
    "heads": (SPEC, KeptShape(heads=2)),
    "channels": (SPEC, KeptShape(mlp=96)),
    "all": (SPEC, KeptShape(layers=1, heads=2, mlp=100)),
    "phi3 channels": (FAMILIES["phi3"], KeptShape(mlp=96)),
    "gpt2 channels": (FAMILIES["gpt2"], KeptShape(mlp=96)),
    "experts": (FAMILIES["qwen3_moe"], KeptShape(experts=3, heads=2)),
    "experts with biases": (spec_of("gpt_oss"), KeptShape(experts=4, heads=2)),
    "experts that are corrected": (
        replace(deepseek := spec_of("deepseek_v3"), experts=replace(deepseek.experts, groups=2)),  # type: ignore[type-var]
        KeptShape(experts=6, mlp=24),
    ),
}


def with_biases(model: Decoder) -> Decoder:
    """What begins as zero (biases, corrections, sinks) is drawn."""
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if not each.any()):
            parameter.copy_(torch.randn_like(parameter))
    return model


@sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_an_ordinary_smaller_model(
    name: str, tokenizer: Tokenizer, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    spec, kept = CASES[name]
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", with_biases(random_model(spec)), tokenizer)
    report = cut(tmp_path / "model", tmp_path / "small", kept, text, token_cache)
    made = load_model(str(tmp_path / "small")).model
    sizes = {"layers": made.spec.layers, "heads": made.spec.heads, "mlp": made.spec.mlp_size}
    assert all(getattr(kept, n) in (None, size) for n, size in sizes.items())
    assert made.get_parameter("layers.0.attention.o.weight").shape[1] == made.spec.output_size
    assert report.measured.result_bytes == pytest.approx(2 * made.spec.params(), abs=20_000)  # headers
    theirs = their_logits(tmp_path / "small", torch.float32)
    torch.testing.assert_close(theirs, logits(tmp_path / "small"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "gemma3"])
def test_layers_with_windows_may_all_go(name: str, tmp_path: Path) -> None:
    """transformers still wants a window, of which no layer then makes use."""
    spec = replace(spec_of(name), window=None, window_layers=())
    write_model(tmp_path, with_biases(random_model(spec)), None)
    torch.testing.assert_close(their_logits(tmp_path, torch.float32), logits(tmp_path), rtol=1e-4, atol=1e-4)
    assert load_model(str(tmp_path)).model.spec.window is None


def test_refitting_loses_less_than_cutting(
    tiny: Path,
    text: Path,
    tokenizer: Tokenizer,
    token_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = KeptShape(mlp=96, heads=2)
    refitted = cut(tiny, tmp_path / "refitted", kept, text, token_cache)
    monkeypatch.setattr("tightfit.compress.structure.structured.refit", lambda weight, hessian, kept: weight[:, kept])
    plain = cut(tiny, tmp_path / "plain", kept, text, token_cache)
    for name, error in refitted.layers[0].errors.items():
        assert 0 < error < plain.layers[0].errors[name]
    tokens = torch.tensor(tokenizer.encode(text.read_text()[500:1500]))[None, :128]
    wanted = logits(tiny, tokens)
    errors = [float((logits(tmp_path / name, tokens) - wanted).square().mean()) for name in ("refitted", "plain")]
    assert errors[0] < errors[1]


def test_the_least_influential_layer_goes(tokenizer: Tokenizer, text: Path, token_cache: Path, tmp_path: Path) -> None:
    """A layer that adds next to nothing is found, and without it the model computes nearly the same."""
    model = random_model(SPEC)
    with torch.no_grad():
        for name in ("attention.o", "mlp.down"):
            model.get_parameter(f"layers.0.{name}.weight").mul_(1e-4)
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", model, tokenizer)
    report = cut(tmp_path / "model", tmp_path / "small", KeptShape(layers=1), text, token_cache)
    assert "without layer 0" in report.recipe
    torch.testing.assert_close(logits(tmp_path / "small"), logits(tmp_path / "model"), rtol=0.01, atol=0.01)


def test_killed_and_run_again(
    tiny: Path, text: Path, token_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptShape(mlp=96, heads=2)
    cut(tiny, tmp_path / "whole", kept, text, token_cache)

    def killed(model: Any, index: int, *rest: Any) -> Any:
        if index == 1:
            raise KeyboardInterrupt
        return cut_layer(model, index, *rest)

    monkeypatch.setattr("tightfit.compress.structure.narrowing.cut_layer", killed)
    with pytest.raises(KeyboardInterrupt):
        cut(tiny, tmp_path / "small", kept, text, token_cache)
    monkeypatch.undo()
    assert cut(tiny, tmp_path / "small", kept, text, token_cache).resumed_layers == 1
    assert torch.equal(logits(tmp_path / "small"), logits(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (KeptShape(), "nothing"),
        (KeptShape(layers=2, mlp=128), "2 of 2 layers, 128 of 128 MLP channels stay, so nothing is cut; keep fewer"),
        (KeptShape(heads=3), "multiple of 2"),
        (KeptShape(layers=3), "give 1 to 2"),
        (KeptShape(mlp=500), "give 1 to 128"),
        (KeptShape(experts=2), "the model has no experts; use --keep-mlp"),
    ],
)
def test_what_is_refused(kept: KeptShape, said: str, tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        cut(tiny, tmp_path / "small", kept, text, token_cache)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "kept", "said"),
    [
        ("olmoe", KeptShape(heads=2), "heads of olmoe models are normed together"),
        ("deepseek_v3", KeptShape(heads=2), "heads of deepseek_v3 models are made of one vector"),
        ("deepseek_v3", KeptShape(experts=6), "experts are in 4 groups, so give a multiple of 4"),
    ],
)
def test_what_a_family_does_not_let_go(name: str, kept: KeptShape, said: str) -> None:
    with pytest.raises(UserError, match=said):
        kept.check(spec_of(name))


@pytest.mark.parametrize(
    ("name", "rows", "belonging"),
    [
        ("gpt_oss", "mlp.router.weight", ("mlp.router.bias", "mlp.experts.gate_bias", "mlp.experts.down_bias")),
        ("deepseek_v3-yarn", "mlp.router.weight", ("mlp.correction", "mlp.experts.up")),
        ("gpt_oss", "attention.q.bias", ("attention.sinks",)),
    ],
)
def test_parts_stay_with_what_belongs_to_them(name: str, rows: str, belonging: tuple[str, ...]) -> None:
    """Biases, corrections and sinks are those that the experts and heads that stay have had."""
    spec = spec_of(name)
    model, index = with_biases(random_model(spec)), spec.layers - 1
    stream = [torch.randn(2, 12, spec.hidden_size, generator=torch.Generator().manual_seed(0))]
    before = {part: tensor.clone() for part, tensor in layer_of(model, index).state_dict().items()}
    heads = None if spec.latent is not None else 2
    after = cut_layer(model, index, KeptShape(experts=4, heads=heads), stream).state
    each = spec.head_dim if rows.startswith("attention") else 1
    wanted, found = (state[rows].reshape(-1, each * state[rows][0].numel()) for state in (before, after))
    numbers = [next(i for i, row in enumerate(wanted) if torch.equal(row, kept)) for kept in found]
    assert len(numbers) < len(wanted)
    for part in belonging:
        assert torch.equal(after[part], before[part][numbers]), part


def test_of_every_group_of_experts_as_many_stay() -> None:
    worth = torch.tensor([9.0, 8, 7, 1, 2, 5, 3, 4])
    assert best_experts(worth, 4, groups=1).tolist() == [0, 1, 2, 5]
    assert best_experts(worth, 4, groups=2).tolist() == [0, 1, 5, 7]
    assert best_experts(worth, 4, groups=4).tolist() == [0, 2, 5, 7]


def test_experts_are_worth_what_is_routed_to_them() -> None:
    """With scores of their own and a correction, as the layer itself routes."""
    spec = spec_of("deepseek_v3")
    model = with_biases(random_model(spec))
    layer = layer_of(model, 1)
    stream = [torch.randn(2, 12, spec.hidden_size, generator=torch.Generator().manual_seed(0))]
    given: list[tuple[Tensor, Routing]] = []
    hook = layer.mlp.experts.register_forward_pre_hook(lambda module, inputs: given.append((inputs[1], inputs[2])))
    with torch.no_grad():
        found = routed_weight(model, layer, stream)
    hook.remove()
    weights, routing = given[0]
    assert found.sum() == pytest.approx(float(weights.sum()), rel=1e-5)
    assert torch.equal(found > 0, routing.load > 0)
