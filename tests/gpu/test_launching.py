"""Processes that are forked from a server which has imported the training loop use the GPU as any other does."""

import subprocess
import sys
from pathlib import Path

import torch
import yaml

from tests.train.jobs import tiny_job
from tightfit.launch.forked import TRAINING, Forked
from tightfit.models.resolve import checkpoints_of
from tightfit.train.metrics import read_metrics


def use_the_gpu(rank: int) -> None:
    assert not torch.cuda._is_in_bad_fork(), "an import of the server's has opened the GPU"
    assert torch.ones(3, device="cuda").sum().item() == 3


def fork_one() -> None:
    with Forked(1, use_the_gpu, (), TRAINING) as process:
        while process.wait():
            pass
        assert not process.failures


def test_the_server_leaves_the_gpu_alone() -> None:
    code = "from tests.gpu.test_launching import fork_one; fork_one()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_launched_rank_trains(tmp_path: Path, corpus: Path, token_cache: Path) -> None:
    job = tiny_job(tmp_path / "run", corpus, token_cache, steps=4, precision="bf16", device="cuda")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json")))
    command = [sys.executable, "-m", "tightfit", "launch", str(tmp_path / "job.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "bf16, NVIDIA" in done.stdout
    assert [row["step"] for row in read_metrics(job.output / "metrics.jsonl") if "loss" in row] == [1, 2, 3, 4]
    assert checkpoints_of(job.output)[-1].name == "step-00000004"
