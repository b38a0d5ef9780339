"""A rank that is killed ends the whole job within bounded time, by name, and leaves a checkpoint that loads.

The victim kills itself: at start-up, in the middle of a step, or while a checkpoint is half written. Ranks are forked
from the server of these tests; test_launching.py kills one of the program's.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.distributed.victim import train_or_die
from tests.train.jobs import tiny_job
from tightfit.cli.main import main
from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.launch.launcher import run_processes
from tightfit.models.loading import load_model
from tightfit.models.resolve import checkpoints_of
from tightfit.train.metrics import read_metrics

BOUND_S = 180
"""On a machine that does other things too."""
SMALL = {"source": "tiny-llama", "shape": {"layers": 2, "hidden_size": 32, "mlp_size": 48}}
pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture
def make(tmp_path: Path, corpus: Path, token_cache: Path) -> Callable[..., tuple[Job, Path]]:
    def made(**changes: Any) -> tuple[Job, Path]:
        fields = {
            "evaluation": {"max_rows": 2},
            "steps": 6,
            "saving": {"every": 2, "sharded": False},
            "model": SMALL,
            "device": "cpu",
        }
        job = tiny_job(tmp_path / "run", corpus, token_cache, **(fields | changes))
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(job.model_dump(mode="json")))
        return job, file

    return made


def launch(job: Job, file: Path, when: str, victim: int, restarts: int = 0, once: str = "") -> None:
    """As `tightfit launch` does, but for the victim."""

    def arguments(attempt: int) -> tuple[Any, ...]:
        return when, victim, once, [str(file), *(["--resume"] if attempt else [])]

    assert run_processes(train_or_die, arguments, job.layout.ranks, restarts, job.output) is None


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
    victim, began = 0 if when == "save" else 1, time.monotonic()
    with pytest.raises(UserError) as told:
        launch(job, file, when, victim)
    assert time.monotonic() - began < BOUND_S
    sentence = str(told.value)
    assert sentence.startswith(f"rank {victim} ended with signal 9 (SIGKILL), and the other ranks with it; ")
    assert [path.name for path in checkpoints_of(job.output)] == saved
    if saved:
        assert saved[-1] in sentence.rpartition("the last good checkpoint is")[2]
        assert load_model(str(job.output)).model.spec.layers == 2


def test_a_job_with_restarts_goes_on_from_its_checkpoint(make: Callable[..., tuple[Job, Path]]) -> None:
    job, file = make(layout={"data": 2, "zero": 1, "micro_batch": 1})
    died = file.parent / "died"
    launch(job, file, "step", 1, restarts=1, once=str(died))
    assert died.exists()
    assert checkpoints_of(job.output)[-1].name == "step-00000006"
    steps = [row["step"] for row in read_metrics(job.output / "metrics.jsonl") if "loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6]


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
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=node-1:29500",
        "-m",
        "tightfit",
        "train",
        str(file),
        "-o",
        "steps=7",
    ]
    assert ask("--nodes", "3") == 2
    assert "which 3 nodes cannot share evenly" in capsys.readouterr().err
    assert ask("--nodes", "2", "--restarts", "3") == 2
    assert "--restarts is 3, but --nodes only prints the line" in capsys.readouterr().err
