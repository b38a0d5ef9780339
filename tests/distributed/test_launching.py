"""`tightfit launch` passes a request to stop on, and names the rank that died rather than those that fell with it."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import yaml
from typer.testing import CliRunner

from tests.distributed.group import Group
from tests.distributed.test_check import TENSOR, judge, target
from tests.programs import started
from tests.train.jobs import tiny_job
from tightfit.cli.main import app
from tightfit.launch import launcher as launching
from tightfit.models.loading import load_model
from tightfit.models.resolve import checkpoints_of
from tightfit.prove import equivalence_check as gate
from tightfit.train.metrics import read_metrics

SMALL = {"source": "tiny-llama", "shape": {"layers": 2, "hidden_size": 32, "mlp_size": 48}}


def test_a_program_checks_starts_again_and_stops(tmp_path: Path, corpus: Path, token_cache: Path) -> None:
    """All of `tightfit launch`: its ranks are compared, started, one is killed, they go on, and are asked to stop."""
    layout = {"data": 2, "zero": 3, "micro_batch": 1}
    job = tiny_job(
        tmp_path / "run",
        corpus,
        token_cache,
        model=SMALL,
        steps=100_000,
        layout=layout,
        device="cpu",
        evaluation={"max_rows": 1},
        saving={"every": 3, "sharded": False},
    )
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json")))
    with started(tmp_path, "launch", str(tmp_path / "job.yaml"), "--check", "--restarts", "1") as program:
        pid = program.pids[0]
        assert until(lambda: checkpoints_of(job.output))
        first = ranks_of(pid)
        os.kill(max(first), signal.SIGKILL)
        assert until(lambda: first.isdisjoint(ranks_of(pid)))
        again = reached(job.output)
        assert until(lambda: reached(job.output) > again + 2)
        ranks = ranks_of(pid)
        os.kill(pid, signal.SIGTERM)
        assert not program.wait(120)
    said, told = ((tmp_path / name).read_text() for name in ("stdout", "stderr"))
    assert program.failures == {0: 128 + signal.SIGTERM}, told
    assert "Traceback" not in told, "of those that missed the killed one"
    assert told.count("tightfit: rank 1 ended with signal 9 (SIGKILL), and the other ranks with it") == 1
    assert len(first) == len(ranks) == 2
    assert said.splitlines()[0] == "2 ranks (data 2, zero 3, micro_batch 1) against one, 2 steps", (
        "no rank has printed anything"
    )
    assert "the same" in said
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    assert int(checkpoints_of(job.output)[-1].name.removeprefix("step-")) == reached(job.output)
    assert load_model(str(job.output)).model.spec.layers == 2


def until(condition: Callable[[], object], limit_s: float = 180) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


def reached(run: Path) -> int:
    return max((row["step"] for row in read_metrics(run / "metrics.jsonl")), default=0)


def ranks_of(program: int) -> set[int]:
    """The processes of its server."""
    children = Path(f"/proc/{program}/task/{program}/children").read_text().split()
    return {int(pid) for child in children for pid in Path(f"/proc/{child}/task/{child}/children").read_text().split()}


def test_a_job_whose_ranks_differ_is_not_started(group: Callable[[int], Group], tmp_path: Path) -> None:
    """The verdict is a real one; only its processes were started elsewhere."""
    checked = target(TENSOR)
    wrong, right = (group(2).run(judge, checked, fault)[0] for fault in ("stale shard", None))
    file = tmp_path / "job.yaml"
    file.write_text("model: tiny-llama\ndata: x\noutput: y\nsteps: 1\nlayout: {tensor: 2}\ndevice: cpu\n")
    for verdict, exit_code, starts in ((wrong, 1, 0), (right, 0, 1)):
        with (
            patch.object(gate, "check", lambda *_, answer=verdict: (answer, checked)),
            patch.object(launching, "run_processes", return_value=None) as start,
        ):
            told = CliRunner().invoke(app, ["launch", str(file), "--check"])
        assert (told.exit_code, start.call_count) == (exit_code, starts), told.output
        assert ("different: step 1" in told.output) == (exit_code == 1)
