"""A real GPU made small: training that does not fit ends in one screen, and `--fit` makes the same job fit."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.cli.conftest import Run
from tests.train.jobs import tiny_job
from tightfit.jobs.job import Job
from tightfit.memory.ledger import Ledger
from tightfit.train.loop import run_job
from tightfit.train.out_of_memory import EXIT_CODE, RunOutOfMemoryError

GIB = 2**30
SHAPE = {
    "layers": 8,
    "hidden_size": 1024,
    "mlp_size": 4096,
    "heads": 16,
    "kv_heads": 16,
    "head_dim": 64,
    "max_positions": 4096,
}
CAP = "3GB"


FEW_BYTES = 64 * 2**20


@pytest.fixture(autouse=True)
def _a_card_of_ones_own() -> Iterator[None]:
    """Nothing of other tests is on the card before, and all of it is there for others afterwards."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # of every stream that other tests have used
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()
    assert left < FEW_BYTES, f"{left} bytes left by other tests: {largest_on_card()}"
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def largest_on_card() -> list[str]:
    """The largest tensors that are there, and what refers to them."""
    found = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.is_cuda]
    found.sort(key=lambda each: -each.untyped_storage().nbytes())
    return [
        f"{tuple(each.shape)} {each.dtype} in {[type(holder).__name__ for holder in gc.get_referrers(each)][:6]}"
        for each in found[:8]
    ]


def job_in(folder: Path, corpus: Path, cache: Path, **changes: Any) -> Job:
    text = folder / "text.txt"
    text.write_text("\n\n".join(path.read_text() for path in sorted(corpus.iterdir())) * 40, encoding="utf-8")
    fields: dict[str, Any] = {
        "model": {"source": "tiny-llama", "shape": SHAPE},
        "precision": "bf16",
        "steps": 2,
        "global_batch": 8,
        "layout": {"micro_batch": 8},
        "schedule": {"kind": "cosine", "warmup_steps": 1},
        "saving": {"every": 1},
        "data": {"train": [str(text)], "held_out": 0, "sequence_length": 2048, "cache": str(cache)},
    }
    return tiny_job(folder / "run", corpus, cache, **{**fields, **changes})


def test_a_card_that_is_too_small_says_what_is_missing(tmp_path: Path, corpus: Path, token_cache: Path) -> None:
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(3 * 10**9 / total)
    with pytest.raises(RunOutOfMemoryError) as caught:
        run_job(job_in(tmp_path, corpus, token_cache), quiet=True)
    found = caught.value.shortage
    assert found.phase in ("forward", "backward")
    assert 0 < found.missing_bytes <= found.wanted_bytes < 2 * GIB
    held = found.held.by_component(found.phase)
    assert held["optimizer states"] == pytest.approx(4 * held["weights"], rel=0.01)
    assert held["master weights"] == pytest.approx(2 * held["weights"], rel=0.01)
    assert held["activations"] > GIB // 4
    assert sum(held.values()) <= 3 * 10**9
    assert found.module.startswith(("layers.", "embed", "norm"))
    assert found.advice is not None


def test_the_advice_makes_room(tmp_path: Path, corpus: Path, token_cache: Path) -> None:
    torch.cuda.set_per_process_memory_fraction(3 * 10**9 / torch.cuda.mem_get_info()[1])
    job = job_in(tmp_path, corpus, token_cache)
    with pytest.raises(RunOutOfMemoryError) as caught:
        run_job(job, quiet=True)
    advice = caught.value.shortage.advice
    assert advice is not None
    del caught
    gc.collect()
    torch.cuda.empty_cache()
    assert run_job(job.model_copy(update={"levers": advice.levers}), quiet=True, overwrite=True).step == 2


def test_the_screen_and_fit(
    tmp_path: Path,
    corpus: Path,
    token_cache: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "job.yaml"
    fields = job_in(tmp_path, corpus, token_cache).model_dump(mode="json", exclude={"levers"})
    file.write_text(yaml.safe_dump(fields), encoding="utf-8")
    failed = Run(capfd, monkeypatch, "train", str(file), "--memory", CAP)
    assert failed.code == EXIT_CODE
    assert "Out of GPU memory" in failed.err
    assert "Traceback" not in failed.err
    gc.collect()
    torch.cuda.empty_cache()
    fitted = Run(capfd, monkeypatch, "train", str(file), "--memory", CAP, "--fit", "--overwrite")
    assert fitted.code == 0, fitted.err
    assert "fit: picked" in fitted.out
    assert "allocated" in fitted.out, "the plan's ledger beside the measured one"
    measured = json.loads((tmp_path / "run" / "ledger.json").read_text())
    ledger = Ledger.from_json({key: measured[key] for key in ("source", "lines")}, "here")
    assert ledger.peak_reserved_bytes() <= 3 * 10**9
