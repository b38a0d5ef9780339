"""Calibration rows that the model writes: its own distribution, the same for the same weights, kept."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.compress.conftest import SPEC, random_model
from tests.covering import sampled
from tightfit.compress.calibration.own_text import own_text
from tightfit.compress.compression import CompressionJob, compress
from tightfit.compress.cost import CompressionCost
from tightfit.compress.recipe import recipe_of
from tightfit.compress.structure.factoring import FactoringJob, factorise
from tightfit.compress.structure.narrowing import NarrowingJob, narrow
from tightfit.compress.structure.structured import KeptShape
from tightfit.errors import UserError
from tightfit.models.generate import Sampling, sample_rows
from tightfit.models.loading import load_model

SILENT: Any = (lambda cost: None, lambda done, total, layer: None)


def rows_of(model: Path, cache: Path, rows: int = 6) -> torch.Tensor:
    return own_text(str(model), SPEC, rows=rows, length=40, device="cpu", cache=cache, progress=False).tokens


def test_the_same_weights_write_the_same(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = rows_of(tiny, tmp_path / "one")
    assert torch.equal(first, rows_of(tiny, tmp_path / "other"))
    assert len(set(first[:, 0].tolist())) == 6
    kept = next((tmp_path / "one").iterdir())
    monkeypatch.setattr("tightfit.compress.calibration.own_text.sample_rows", None)  # not called again
    assert torch.equal(first, rows_of(tiny, tmp_path / "one"))
    monkeypatch.undo()
    for damaged in (b"", kept.read_bytes()[:-9], b"\x93NUMPY nonsense"):
        kept.write_bytes(damaged)
        assert torch.equal(first, rows_of(tiny, tmp_path / "one"))
    np.save(kept, first.numpy() + SPEC.vocab_size)
    assert torch.equal(first, rows_of(tiny, tmp_path / "one"))


def test_a_cache_that_cannot_be_written_is_a_sentence(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model writes anything, where that can be known."""
    file = tmp_path / "file"
    file.touch()
    with monkeypatch.context() as nobody_writes:
        nobody_writes.setattr("tightfit.compress.calibration.own_text.sample_rows", None)
        with pytest.raises(UserError, match=r"file is not a directory"):
            rows_of(tiny, file)

    def full(*arguments: object) -> None:
        raise OSError("2048 requested and 1008 written")

    monkeypatch.setattr("tightfit.compress.calibration.own_text.np.save", full)
    with pytest.raises(UserError, match=r"cannot write .*npy: 2048 requested and 1008 written; make room"):
        rows_of(tiny, tmp_path / "cache")


def test_rows_follow_the_models_distribution() -> None:
    """Of 2,000 second tokens after the same first one, as many are each as the model says, within five sigma."""
    model = random_model(SPEC)
    with torch.no_grad():
        said = model(torch.tensor([[7]])).logits[0, -1].softmax(-1)
    rows = sample_rows(model, torch.full((2000,), 7), 2, Sampling(temperature=1.0))
    counts = torch.bincount(rows[:, 1], minlength=SPEC.vocab_size)
    assert (counts - 2000 * said).abs().le(5 * (2000 * said * (1 - said)).sqrt() + 1).all()


def test_rows_are_what_a_whole_pass_would_choose() -> None:
    """Greedily: the cache is right over the whole row."""
    model = random_model(SPEC)
    rows = sample_rows(model, torch.tensor([3, 200]), 30, Sampling(temperature=0))
    with torch.no_grad():
        assert torch.equal(model(rows).logits.argmax(-1)[:, :-1], rows[:, 1:])


def test_a_card_that_does_not_hold_the_model_is_a_sentence(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **more: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("tightfit.compress.calibration.own_text.load_model", full)
    with pytest.raises(UserError, match=r"does not fit on cpu as a whole.*give --data"):
        rows_of(tiny, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_it_costs_is_told_before_it_is_written(tiny: Path, tmp_path: Path) -> None:
    told: list[CompressionCost] = []

    def stop(cost: CompressionCost) -> None:
        told.append(cost)
        raise KeyboardInterrupt

    job = CompressionJob(
        model=str(tiny), out=tmp_path / "small", recipe=recipe_of("gptq", bits=4, group=32), cache=tmp_path / "cache"
    )
    with pytest.raises(KeyboardInterrupt):
        compress(job, stop, lambda *done: None)
    assert told[0].calibration.startswith("32 × 128 tokens of the model's own text")
    assert not (tmp_path / "cache").exists()


SHARED: dict[str, Any] = {"samples": 2, "length": 8}


@sampled(2)
@pytest.mark.parametrize(
    "shrink",
    [
        lambda **job: factorise(FactoringJob(method="svd", **job, **SHARED), *SILENT),
        lambda **job: narrow(NarrowingJob(kept=KeptShape(mlp=64), **job, **SHARED), *SILENT),
        lambda **job: compress(CompressionJob(recipe=recipe_of("gptq"), **job, **SHARED), *SILENT),
    ],
    ids=["svd", "structured", "gptq"],
)
def test_a_model_without_tokenizer_needs_none(shrink: Callable[..., object], tiny: Path, tmp_path: Path) -> None:
    """What the model writes is tokens already."""
    shutil.copytree(tiny, tmp_path / "bare", ignore=shutil.ignore_patterns("token*", "chat*"))
    shrink(model=str(tmp_path / "bare"), out=tmp_path / "small", cache=tmp_path / "cache")
    assert load_model(str(tmp_path / "small")).tokenizer is None
