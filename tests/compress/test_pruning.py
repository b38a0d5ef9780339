"""Pruned weights against the papers' formulas in float64, one weight at a time, and pruned models end to end."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compress.test_compression import logits, run
from tests.compress.test_transformers import their_logits
from tests.covering import sampled
from tightfit.compress.recipe import recipe_of
from tightfit.compress.structure.pruning import Sparsity, magnitude, sparsegpt, wanda
from tightfit.errors import UserError
from tightfit.models.loading import load_model

SPARSITIES = [Sparsity(share=0.5), Sparsity(share=0.3), Sparsity(kept=2, group=4), Sparsity(kept=1, group=8)]


def sample(outputs: int = 12, inputs: int = 160, tokens: int = 400) -> tuple[Tensor, Tensor]:
    """A weight and H of inputs that are correlated and of unlike size, float64."""
    generator = torch.Generator().manual_seed(7)
    mix = torch.randn(inputs, inputs, generator=generator, dtype=torch.float64) / inputs**0.5
    x = torch.randn(tokens, inputs, generator=generator, dtype=torch.float64) @ mix
    x = x * torch.rand(inputs, generator=generator, dtype=torch.float64) * 3
    return torch.randn(outputs, inputs, generator=generator, dtype=torch.float64), x.T @ x / tokens


def lowest(worth: list[float], sparsity: Sparsity) -> set[int]:
    """The places to prune in a list."""
    if not sparsity.group:
        return set(sorted(range(len(worth)), key=worth.__getitem__)[: round(sparsity.share * len(worth))])
    found: set[int] = set()
    for start in range(0, len(worth), sparsity.group):
        places = sorted(range(start, start + sparsity.group), key=worth.__getitem__)
        found |= set(places[: sparsity.group - sparsity.kept])
    return found


@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_magnitude(sparsity: Sparsity) -> None:
    weight, _ = sample()
    flat = weight.flatten().tolist()
    gone = lowest([abs(w) for w in flat], sparsity)
    assert magnitude(weight, sparsity).flatten().tolist() == [0.0 if i in gone else w for i, w in enumerate(flat)]


@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_wanda(sparsity: Sparsity) -> None:
    """|w_ij| · ‖x_j‖ is compared within a row."""
    weight, hessian = sample()
    made = wanda(weight, hessian, sparsity)
    for row, found in zip(weight.tolist(), made.tolist(), strict=True):
        gone = lowest([abs(w) * float(hessian[j, j]) ** 0.5 for j, w in enumerate(row)], sparsity)
        assert found == [0.0 if j in gone else w for j, w in enumerate(row)]


def by_elimination(weight: Tensor, hessian: Tensor, sparsity: Sparsity, damping: float, block: int) -> Tensor:
    """SparseGPT with H⁻¹ of the columns that remain, one column removed from it at a time: no Cholesky factor."""
    weight, size = weight.clone(), len(hessian)
    inverse = torch.linalg.inv(hessian + damping * hessian.diagonal().mean() * torch.eye(size, dtype=hessian.dtype))
    diagonals, rest = [], inverse.clone()
    for _ in range(size):
        diagonals.append(float(rest[0, 0]))
        rest = (rest - rest[:, :1] * rest[:1] / rest[0, 0])[1:, 1:]
    gone = torch.zeros_like(weight, dtype=torch.bool)
    every = sparsity.group or block
    for j in range(size):
        if j % every == 0:
            part = slice(j, min(j + every, size))
            worth = weight[:, part].square() / torch.tensor(diagonals[part]).double()
            chosen = lowest(worth.flatten().tolist(), sparsity)
            places = [i in chosen for i in range(worth.numel())]
            gone[:, part] = torch.tensor(places).view_as(worth)
        error = torch.where(gone[:, j], weight[:, j], 0) / inverse[0, 0]
        weight[:, j:] -= error[:, None] * inverse[0]
        weight[gone[:, j], j] = 0
        inverse = (inverse - inverse[:, :1] * inverse[:1] / inverse[0, 0])[1:, 1:]
    return weight


@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_sparsegpt(sparsity: Sparsity) -> None:
    weight, hessian = sample()
    wanted = by_elimination(weight, hessian, sparsity, damping=0.01, block=128)
    made = sparsegpt(weight.clone(), hessian, sparsity, damping=0.01)
    assert torch.equal(made == 0, wanted == 0)
    torch.testing.assert_close(made, wanted, rtol=1e-8, atol=1e-8)


def test_methods_that_look_at_inputs_lose_less() -> None:
    weight, hessian = sample()
    for sparsity in SPARSITIES:
        made = (magnitude(weight, sparsity), wanda(weight, hessian, sparsity), sparsegpt(weight, hessian, sparsity))
        lost = [float(((m - weight) @ hessian * (m - weight)).sum()) for m in made]
        assert lost[2] < lost[1] < lost[0]


CASES: dict[str, dict[str, Any]] = {
    "magnitude": {"sparsity": 0.3},
    "wanda": {"pattern": "2:4"},
    "sparsegpt": {"pattern": "2:4"},
    "sparsegpt+gptq": {"pattern": "2:4", "bits": 8, "group": 32},
    "wanda+rtn": {"sparsity": 0.5, "bits": 8, "group": 32, "symmetric": False},
}


@sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_models(name: str, tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    report = run(tiny, tmp_path / "small", recipe_of(name, **CASES[name]), text, token_cache)
    model = load_model(str(tmp_path / "small"), packed=False).model
    share = CASES[name].get("sparsity", 0.5)
    for part in ("attention.q", "attention.o", "mlp.gate", "mlp.down"):
        for index in range(model.spec.layers):
            weight = model.get_parameter(f"layers.{index}.{part}.weight")
            assert float((weight == 0).float().mean()) == pytest.approx(share, abs=0.01 if "+" in name else 1e-3)
            if "pattern" in CASES[name]:
                assert int((weight.view(-1, 4) != 0).sum(1).max()) <= 2
    assert report.measured.result_bytes == pytest.approx(report.predicted.result_bytes, abs=40_000)
    wanted, made = logits(tiny), logits(tmp_path / "small")
    assert 1e-4 < float((made - wanted).square().mean() / wanted.square().mean()) < 0.5
    if "+" not in name:
        torch.testing.assert_close(their_logits(tmp_path / "small", torch.float32), made, rtol=1e-4, atol=1e-4)


def test_what_is_refused(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    for method, options, said in (
        ("wanda", {"pattern": "4:2"}, "N:M"),
        ("wanda", {"sparsity": 1.5}, "between 0 and 1"),
        ("wanda", {"pattern": "2:48"}, "no whole groups"),
        ("wanda", {"bits": 4}, "add a coding"),
        ("gptq", {"pattern": "2:4"}, "--pattern would prune; put one of"),
        ("wanda+binary", {"group": 32}, "no code for zero"),
    ):
        with pytest.raises(UserError, match=said):
            run(tiny, tmp_path / "small", recipe_of(method, **options), text, token_cache)
    assert list(tmp_path.iterdir()) == []
