"""Starting a job's processes on this machine, and ending with one sentence when one of them dies.

The processes are torchrun's: its elastic agent (torch.distributed.launcher) starts one per rank, watches them, ends the
others when one dies (SIGTERM, and after 30 s SIGKILL), and starts all of them again where restarts are allowed. Ranks
that wait for a dead one in a collective are ended that way or by the collective's own timeout (parallel/mesh.py).
Several machines need the line of `torchrun_line` on each of them, or Slurm (plan/export/launch.py).
"""

import shlex
import signal
import sys
import uuid
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.train.checkpoint import what_is_safe
from tightfit.train.precision import choose_device

PORT = 29500


def torchrun_line(ranks: int, nodes: int, head: str, arguments: list[str]) -> str:
    """The line to run on each of `nodes` machines, of which `head` is one that all of them reach."""
    if nodes < 1 or ranks % nodes:
        raise UserError(f"the job's layout has {ranks} ranks, which {nodes} nodes cannot share evenly; change one")
    meeting = f"--rdzv-backend=c10d --rdzv-endpoint={head}:{PORT}" if nodes > 1 else "--standalone"
    words = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={ranks // nodes}", *meeting.split()]
    return shlex.join([*words, "-m", "tightfit", "train", *arguments])


def launch(job: Job, arguments: list[str], restarts: int = 0) -> None:
    """`tightfit train ARGUMENTS` on as many processes as the job has ranks; returns when all have ended well."""
    ranks = job.layout.ranks
    if choose_device(job.device).type == "cuda" and torch.cuda.device_count() < ranks:
        raise UserError(
            f"the job's layout has {ranks} ranks, but this machine has {torch.cuda.device_count()} GPUs; "
            "change the layout, use --nodes or set device=cpu"
        )
    if restarts and "--resume" not in arguments:
        arguments = [*arguments, "--resume"]
    run_processes([sys.executable, "-m", "tightfit", "train", *arguments], ranks, restarts, job.output)


def run_processes(command: list[str], processes: int, restarts: int, run: Path) -> None:
    """Start `command` once per rank; a rank that fails is named, with what can be resumed from."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=restarts, monitor_interval=0.2,
    )  # fmt: skip
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"exit code {failure.exitcode}"
        if failure.exitcode < 0:
            how = f"signal {-failure.exitcode} ({signal.Signals(-failure.exitcode).name})"
        raise UserError(
            f"rank {rank} ended with {how}, and the other ranks with it; {what_is_safe(run)}; add --resume to go on"
        ) from None
