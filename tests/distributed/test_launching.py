"""`tightfit launch` passes a request to stop on, and names the rank that died rather than those that fell with it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import yaml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from typer.testing import CliRunner

from tests.distributed.group import Group
from tests.distributed.test_check import TENSOR, judge, subject
from tests.train.jobs import tiny_job
from tightfit.cli.main import app
from tightfit.models.loading import checkpoints_of, load_model
from tightfit.train import gate, launching
from tightfit.train.launching import _cause
from tightfit.train.metrics import read_metrics

SMALL = {"source": "tiny-llama", "shape": {"layers": 2, "hidden_size": 32, "mlp_size": 48}}


def test_a_request_to_stop_reaches_all_ranks(tmp_path: Path, corpus: Path, token_cache: Path) -> None:
    layout = {"data": 2, "zero": 3, "micro_batch": 1}
    job = tiny_job(tmp_path / "run", corpus, token_cache, model=SMALL, steps=100_000, layout=layout, device="cpu",
                   evaluation={"max_rows": 1})  # fmt: skip
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json")))
    process = subprocess.Popen(
        [sys.executable, "-m", "tightfit", "launch", str(tmp_path / "job.yaml")],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 180
    while len(read_metrics(job.output / "metrics.jsonl")) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, told
    assert "Traceback" not in told
    assert len(checkpoints_of(job.output)) == 1
    assert load_model(str(job.output)).model.spec.layers == 2


def failure(rank: int, exit_code: int) -> ProcessFailure:
    return ProcessFailure(local_rank=rank, pid=1000 + rank, exitcode=exit_code, error_file="")


def test_the_rank_that_died_is_named() -> None:
    """All are seen to have ended in the same moment; those that waited for the dead one with an error of their own."""
    fell, died = {rank: failure(rank, 1) for rank in (0, 1, 3)}, {2: failure(2, -signal.SIGKILL)}
    assert _cause(ChildFailedError("train", fell | died))[0] == 2
    assert _cause(ChildFailedError("train", fell))[0] == 0
    own = {0: failure(0, 2), 1: failure(1, -signal.SIGTERM)}
    assert _cause(ChildFailedError("train", own))[0] == 0


def test_a_job_whose_ranks_differ_is_not_started(group: Callable[[int], Group], tmp_path: Path) -> None:
    """The verdict is a real one; only its processes were started elsewhere."""
    checked = subject(TENSOR)
    wrong, right = (group(2).run(judge, checked, fault)[0] for fault in ("stale shard", None))
    file = tmp_path / "job.yaml"
    file.write_text("model: tiny-llama\ndata: x\noutput: y\nsteps: 1\nlayout: {tensor: 2}\ndevice: cpu\n")
    for verdict, exit_code, started in ((wrong, 1, 0), (right, 0, 1)):
        with (
            patch.object(gate, "check", lambda *_, answer=verdict: (answer, checked)),
            patch.object(launching, "run_processes", return_value=None) as start,
        ):
            told = CliRunner().invoke(app, ["launch", str(file), "--check"])
        assert (told.exit_code, start.call_count) == (exit_code, started), told.output
        assert ("different: step 1" in told.output) == (exit_code == 1)
