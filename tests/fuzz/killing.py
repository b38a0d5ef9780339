"""`python -m tests.fuzz.killing --kills 50`: a training run that is killed again and again still arrives.

The run saves after every step, so most kills fall into saving. After each, what is there must load, no step may have
been lost, and in the end weights, optimizer states and metrics are those of a run that nobody disturbed.
"""

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.fuzz.materials import TEXTS
from tests.shared_server import PRELOADED
from tests.train.jobs import checkpoint_files, latest_checkpoint, run_and_die, tiny_job
from tightfit.jobs.job import Job
from tightfit.launch.forked import start_server
from tightfit.models.loading import load_model
from tightfit.train.loop import run_job
from tightfit.train.metrics import read_metrics

STEPS = 40
LONGEST_WAIT_S = 0.15


def kill_and_resume(job: Job, kills: int, seed: int) -> int:
    """Kill the run of `job` so often, each time at another instant; returns how many kills hit a hidden directory."""
    start_server(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    chance, fields, reached, in_saving = random.Random(seed), job.model_dump(mode="json"), 0, 0
    for kill in range(kills):
        process = context.Process(target=run_and_die, args=(fields, kill > 0))
        before = latest_checkpoint(job.output)
        process.start()
        wait_for_progress(job.output, before, process)
        time.sleep(chance.uniform(0, LONGEST_WAIT_S))
        assert process.pid is not None
        assert process.exitcode in (None, 0), f"kill {kill}: the run ended by itself with exit code {process.exitcode}"
        process.kill()
        process.join()
        in_saving += any(path.name.startswith(".") for path in (job.output / "checkpoints").iterdir())
        reached = _check_what_is_left(job, reached)
        if reached == STEPS:
            run_job(job, overwrite=True, stop_after=1, quiet=True)
            reached = 1
    return in_saving


def _check_what_is_left(job: Job, reached: int) -> int:
    """The step that can be resumed from, which must not be an earlier one."""
    found = latest_checkpoint(job.output)
    assert found is not None, "no checkpoint is left"
    assert load_model(str(job.output)).source
    step = int(found.name.removeprefix("step-"))
    assert step >= reached, f"step {reached} was saved, and now {step} is the last"
    return step


def wait_for_progress(run: Path, before: Path | None, process: Any) -> None:
    """Until the process has saved something of its own (or ended)."""
    folder, deadline = run / "checkpoints", time.monotonic() + 60
    while process.is_alive() and time.monotonic() < deadline:
        newest = max((path.name for path in folder.glob("step-*")), default="") if folder.is_dir() else ""
        if newest > (before.name if before is not None else ""):
            return
        time.sleep(0.002)


def main() -> int:
    """Say how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        (folder / "corpus").mkdir()
        for index in range(20):
            (folder / "corpus" / f"{index}.txt").write_text("\n".join(TEXTS) * 2, encoding="utf-8")
        model = {"source": "tiny-llama", "shape": {"layers": 2, "hidden_size": 32, "mlp_size": 48}}
        killed, straight = (
            tiny_job(
                folder / output,
                folder / "corpus",
                folder / "cache",
                steps=STEPS,
                saving={"every": 1, "keep": 2},
                model=model,
                evaluation={"max_rows": 1},
                global_batch=2,
            )
            for output in ("killed", "straight")
        )
        expected = checkpoint_files(run_job(straight, quiet=True).checkpoint)
        in_saving = kill_and_resume(killed, asked.kills, asked.seed)
        final = run_job(killed, resume=True, quiet=True)
        assert checkpoint_files(final.checkpoint) == expected, "the killed run arrives somewhere else"
        steps = [row["step"] for row in read_metrics(killed.output / "metrics.jsonl") if "loss" in row]
        assert steps == list(range(1, STEPS + 1)), f"metrics are of the steps {steps}"
    print(f"{asked.kills} kills, {in_saving} of them in the middle of a checkpoint; the run arrived all the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
