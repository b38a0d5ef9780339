"""A rank that is killed ends the whole job within bounded time, by name, and leaves a checkpoint that loads.

The victim kills itself with SIGKILL, which nothing can catch: at start-up, in the middle of a step, or while a
checkpoint is half written.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.train.jobs import tiny_job
from tightfit.cli.main import main
from tightfit.jobs.job import Job
from tightfit.models.loading import checkpoints_of, load_model
from tightfit.train.metrics import read_metrics

BOUND_S = 180
"""On a machine that does other things too: starting Python and torch takes most of it."""
SMALL = {"source": "tiny-llama", "shape": {"layers": 2, "hidden_size": 32, "mlp_size": 48}}
VICTIM = """
import os, signal
when, rank, once = os.environ.get("VICTIM", "").split(",") if "RANK" in os.environ else ("", "", "")
def die(*arguments, **options):
    if once and os.path.exists(once):
        return None
    if once:
        open(once, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
if rank == os.environ.get("RANK"):
    if when == "start":
        die()
    if when == "step":
        import tightfit.train.optimizer as module
        original, steps = module.MasterAdamW.step, []
        def step(self, *arguments):
            steps.append(1)
            return die() or original(self, *arguments) if len(steps) == 3 else original(self, *arguments)
        module.MasterAdamW.step = step
    if when == "save":
        import tightfit.train.checkpoint as module
        from tightfit.train.checkpoint import checkpoints_of
        original = module._write_training_state
        def write(folder, *arguments):
            saved = checkpoints_of(folder.parent.parent.parent)
            return die() or original(folder, *arguments) if saved else original(folder, *arguments)
        module._write_training_state = write
"""


@pytest.fixture
def make(tmp_path: Path, corpus: Path, token_cache: Path) -> Callable[..., tuple[Job, Path]]:
    def made(**changes: Any) -> tuple[Job, Path]:
        (tmp_path / "sitecustomize.py").write_text(VICTIM)
        fields = {"evaluation": {"max_rows": 2}, "steps": 6, "saving": {"every": 2}, "model": SMALL, "device": "cpu"}
        job = tiny_job(tmp_path / "run", corpus, token_cache, **(fields | changes))
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(job.model_dump(mode="json")))
        return job, file

    return made


def launch(file: Path, victim: str, *options: str) -> tuple[subprocess.CompletedProcess[str], float]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VICTIM": victim, "PYTHONPATH": f"{file.parent}:{Path.cwd()}"}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tightfit", "launch", str(file), *options],
        env=environment, capture_output=True, text=True, timeout=BOUND_S,
    )  # fmt: skip
    return done, time.monotonic() - began


@pytest.mark.parametrize(
    ("when", "layout", "saved"),
    [
        ("start", {"data": 2, "zero": 3, "micro_batch": 1}, []),
        ("step", {"pipeline": 2, "micro_batch": 1}, ["step-00000002"]),
        ("save", {"data": 2, "micro_batch": 1}, ["step-00000002"]),
    ],
)
def test_a_killed_rank_ends_the_job_by_name(
    make: Callable[..., tuple[Job, Path]], when: str, layout: dict[str, Any], saved: list[str]
) -> None:
    job, file = make(layout=layout)
    rank = 0 if when == "save" else 1
    done, seconds = launch(file, f"{when},{rank},")
    assert done.returncode == 2, done.stderr
    assert f"tightfit: rank {rank} ended with signal 9 (SIGKILL)" in done.stderr
    assert seconds < BOUND_S
    assert [path.name for path in checkpoints_of(job.output)] == saved
    if saved:
        assert saved[-1] in done.stderr.rpartition("the last good checkpoint is")[2]
        assert load_model(str(job.output)).model.spec.layers == 2


def test_a_job_with_restarts_goes_on_from_its_checkpoint(make: Callable[..., tuple[Job, Path]]) -> None:
    job, file = make(layout={"data": 2, "zero": 1, "micro_batch": 1})
    done, _ = launch(file, f"step,1,{file.parent / 'died'}", "--restarts", "1")
    assert done.returncode == 0, done.stderr
    assert (file.parent / "died").exists()
    assert checkpoints_of(job.output)[-1].name == "step-00000006"
    steps = [row["step"] for row in read_metrics(job.output / "metrics.jsonl") if "loss" in row]
    assert steps == sorted(set(steps))


def test_several_nodes_get_a_line(
    make: Callable[..., tuple[Job, Path]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, file = make(layout={"data": 4, "zero": 1, "micro_batch": 1})

    def ask(*options: str) -> object:
        monkeypatch.setattr("sys.argv", ["tightfit", "launch", str(file), *options])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code

    assert ask("--nodes", "2", "--head", "node-1", "-o", "steps=7") == 0
    assert capsys.readouterr().out.split() == [
        "torchrun", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node-1:29500",
        "-m", "tightfit", "train", str(file), "-o", "steps=7",
    ]  # fmt: skip
    assert ask("--nodes", "3") == 2
    assert "which 3 nodes cannot share evenly" in capsys.readouterr().err
