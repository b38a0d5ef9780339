"""What compressing says it has lost, against both models loaded whole and compared on the same rows."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compress.conftest import SPEC
from tests.covering import sampled
from tightfit.compress.compression import CompressionJob, compress
from tightfit.compress.job import ShrinkingJob
from tightfit.compress.loss_probe import LossProbe
from tightfit.compress.memory import PROBED_LENGTH, PROBED_ROWS
from tightfit.compress.recipe import recipe_of
from tightfit.compress.report import CompressionReport
from tightfit.compress.structure.factoring import FactoringJob, factorise
from tightfit.compress.structure.narrowing import NarrowingJob, narrow
from tightfit.compress.structure.structured import KeptShape
from tightfit.models.loading import load_model

WAYS: dict[str, Any] = {
    "gptq": lambda **job: CompressionJob(recipe=recipe_of("gptq", bits=3, group=32), **job),
    "round": lambda **job: CompressionJob(recipe=recipe_of("round", bits=3, group=32, steps=3), **job),
    "rotate+awq": lambda **job: CompressionJob(recipe=recipe_of("rotate+awq", bits=3, group=32), **job),
    "wanda": lambda **job: CompressionJob(recipe=recipe_of("wanda", sparsity=0.5), **job),
    "layers": lambda **job: NarrowingJob(kept=KeptShape(layers=1, mlp=96), **job),
    "svd": lambda **job: FactoringJob(keep=0.6, **job),
}


def done(job: ShrinkingJob, stop_at: int | None = None) -> CompressionReport:
    """Do it; interrupted behind a layer where one is named."""

    def told(done: int, total: int, layer: Any) -> None:
        if done == stop_at:
            raise KeyboardInterrupt

    if isinstance(job, CompressionJob):
        return compress(job, lambda cost: None, told)
    if isinstance(job, NarrowingJob):
        return narrow(job, lambda cost: None, told)
    assert isinstance(job, FactoringJob)
    return factorise(job, lambda cost: None, told)


def whole_models_kl(job: ShrinkingJob, rows: int) -> float:
    """By the definition, with all of both models in memory."""
    tokens = job.read_calibration(SPEC).tokens[:rows]
    with torch.no_grad():
        logits = [load_model(str(source)).model(tokens).logits for source in (job.model, job.out)]
        p, q = (found.double().log_softmax(-1) for found in logits if found is not None)
    return float((p.exp() * (p - q)).sum(-1).mean())


@sampled(4)
@pytest.mark.parametrize("way", WAYS)
def test_against_whole_models(way: str, tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    """More rows than are probed; and the same number from a run that goes on where another was stopped."""
    given = {"model": str(tiny), "data": (str(text),), "samples": PROBED_ROWS + 2, "length": 64, "cache": token_cache}
    job = WAYS[way](out=tmp_path / "small", **given)
    report = done(job)
    assert report.predicted.kl is None
    assert report.measured.kl == pytest.approx(whole_models_kl(job, PROBED_ROWS), rel=0.02)
    again = WAYS[way](out=tmp_path / "again", **given)
    with pytest.raises(KeyboardInterrupt):
        done(again, stop_at=1)
    assert done(again).measured.kl == pytest.approx(report.measured.kl, rel=1e-3)


def test_without_text_nothing_is_measured(tiny: Path, tmp_path: Path) -> None:
    job = CompressionJob(model=str(tiny), out=tmp_path / "small", recipe=recipe_of("rtn", bits=8))
    assert done(job).measured.kl is None


def test_rows_that_are_probed() -> None:
    """The first tokens of the first rows, whatever the batches."""
    rows = torch.randn(3 * PROBED_ROWS, PROBED_LENGTH + 5, 2)
    for batch in (1, 3, PROBED_ROWS, len(rows)):
        assert torch.equal(torch.cat(LossProbe(rows.split(batch)).original), rows[:PROBED_ROWS, :PROBED_LENGTH])
    assert LossProbe([]).original == []
