"""Low-rank factors against the theorem that says how good they can be, and factored models end to end."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.compress.conftest import SPEC, random_model
from tests.compress.held import assert_held_as_said
from tests.compress.test_compression import FAMILIES, TOKENS, logits
from tests.compress.test_pruning import sample
from tests.compress.test_structured import spec_of
from tightfit.compress.report import CompressionReport
from tightfit.compress.structure.factoring import FactoringJob, factorise
from tightfit.compress.structure.low_rank import choose_ranks, factor, singular_energies
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.loading import load_into, load_model
from tightfit.models.low_rank import LowRankLinear
from tightfit.models.saving import write_model
from tightfit.models.text.tokenizer import Tokenizer


def run(model: Path, out: Path, text: Path, cache: Path, **more: Any) -> CompressionReport:
    job = FactoringJob(model=str(model), out=out, data=(str(text),), samples=8, length=64, cache=cache, **more)
    return factorise(job, lambda cost: None, lambda done, total, layer: None)


def test_factors_reach_the_best_there_is() -> None:
    """Plain: Σ σ² beyond r of W. Whitened: the same of W H^½, with the symmetric root rather than Cholesky's."""
    weight, hessian = sample(outputs=30, inputs=48, tokens=400)
    values, vectors = torch.linalg.eigh(hessian)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    for rank in (1, 7, 20):
        plain = factor(weight, rank)
        assert (plain.first.shape, plain.second.shape) == ((rank, 48), (30, rank))
        best = torch.linalg.svdvals(weight)[rank:].square().sum()
        torch.testing.assert_close((plain.product - weight).square().sum(), best)
        white = factor(weight, rank, hessian).product - weight
        best = torch.linalg.svdvals(weight @ root)[rank:].square().sum()
        torch.testing.assert_close((white @ hessian * white).sum(), best, rtol=1e-3, atol=0)
        change = plain.product - weight
        assert float((white @ hessian * white).sum()) < float((change @ hessian * change).sum())


def test_ranks_share_a_budget() -> None:
    """Within it, more where more is won, matrices whole where factors would be larger."""
    shapes = {"steep": (40, 40), "flat": (40, 40), "wide": (20, 80)}
    torch.manual_seed(0)
    steep = torch.randn(40, 3) @ torch.randn(3, 40) + 0.01 * torch.randn(40, 40)
    weights = {"steep": steep, "flat": torch.randn(40, 40), "wide": torch.randn(20, 80)}
    energies = {name: singular_energies(weight).tolist() for name, weight in weights.items()}
    for share in (0.3, 0.6, 0.9):
        ranks = choose_ranks(energies, shapes, share)
        held = sum(ranks[n] * sum(s) if n in ranks else s[0] * s[1] for n, s in shapes.items())
        total = sum(s[0] * s[1] for s in shapes.values())
        assert 0.8 * share * total < held <= share * total
        assert all(rank * sum(shapes[name]) < shapes[name][0] * shapes[name][1] for name, rank in ranks.items())
    assert choose_ranks(energies, shapes, 0.3)["steep"] == 3
    assert choose_ranks(energies, shapes, 0.3)["flat"] > 3


@pytest.mark.parametrize("method", ["svd", "whitened"])
def test_a_factored_model(method: str, tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    report = run(tiny, tmp_path / "small", text, token_cache, method=method, keep=0.7)
    made = load_model(str(tmp_path / "small")).model
    assert any(isinstance(module, LowRankLinear) for module in made.modules())
    held = 2 * sum(parameter.numel() for parameter in made.parameters())
    assert report.predicted.result_bytes == held == assert_held_as_said(tmp_path / "small").total_bytes
    assert report.measured.result_bytes == pytest.approx(held, abs=20_000)  # headers
    ours = logits(tmp_path / "small")
    dense = Decoder(made.spec)
    load_into(dense, str(tmp_path / "small"))
    torch.testing.assert_close(dense(TOKENS).logits, ours, rtol=1e-3, atol=1e-3)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "small", dtype=torch.float32, trust_remote_code=True
    )
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, ours, rtol=1e-3, atol=1e-3)


def test_factors_with_biases(tokenizer: Tokenizer, text: Path, token_cache: Path, tmp_path: Path) -> None:
    model = random_model(replace(SPEC, family="qwen2", qkv_bias=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", model, tokenizer)
    run(tmp_path / "model", tmp_path / "small", text, token_cache, keep=0.7)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "small", dtype=torch.float32, trust_remote_code=True
    )
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, logits(tmp_path / "small"), rtol=1e-3, atol=1e-3)


def test_what_is_refused(tiny: Path, tokenizer: Tokenizer, text: Path, token_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="share"):
        run(tiny, tmp_path / "small", text, token_cache, keep=1.5)
    with pytest.raises(UserError, match=r"--keep is 0.02, but factors of rank one already keep 0.02\d\d; give more"):
        run(tiny, tmp_path / "small", text, token_cache, keep=0.02)  # more would have been written than was said
    for name, spec in (("phi", FAMILIES["phi3"]), ("latent", spec_of("deepseek_v2-lite"))):
        (tmp_path / name).mkdir()
        write_model(tmp_path / name, random_model(spec), tokenizer)
        with pytest.raises(UserError, match="stack or transpose"):
            run(tmp_path / name, tmp_path / "small", text, token_cache)
    run(tiny, tmp_path / "small", text, token_cache)
    config = tmp_path / "small/config.json"
    whole = config.read_text()
    for change in ('"low_rank": {"model.layers.9.mlp.up_proj": 3}', '"low_rank": []'):
        start = whole.index('"low_rank"')
        config.write_text(whole[:start] + change + whole[whole.index("}", start) + 1 :])
        with pytest.raises(UserError, match="low_rank"):
            load_model(str(tmp_path / "small"))
