"""Starting a job's processes on this machine, and ending with one sentence when one of them dies.

The processes are torchrun's: its elastic agent (torch.distributed.launcher) starts one per rank, watches them, ends the
others when one dies (SIGTERM, and after 30 s SIGKILL), and starts all of them again where restarts are allowed. SIGINT
or SIGTERM to the agent it passes on: ranks finish their step, save and stop, within the same 30 s. Ranks that wait for
a dead one in a collective are ended that way or by the collective's own timeout (parallel/mesh.py).
Several machines need the line of `torchrun_line` on each of them, or Slurm (plan/export/launch.py).
"""

import shlex
import signal
import sys
import uuid
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.train.checkpoint import what_is_safe
from tightfit.train.precision import choose_device

PORT = 29500
DEATHS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)
"""Signals that end a process from outside or by a fault of its own; others fail because of it, a moment later."""


def torchrun_line(ranks: int, nodes: int, head: str, arguments: list[str]) -> str:
    """The line to run on each of `nodes` machines, of which `head` is one that all of them reach."""
    if nodes < 1 or ranks % nodes:
        raise UserError(f"the job's layout has {ranks} ranks, which {nodes} nodes cannot share evenly; change one")
    meeting = f"--rdzv-backend=c10d --rdzv-endpoint={head}:{PORT}" if nodes > 1 else "--standalone"
    words = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={ranks // nodes}", *meeting.split()]
    return shlex.join([*words, "-m", "tightfit", "train", *arguments])


def launch(job: Job, arguments: list[str], restarts: int = 0) -> int | None:
    """`tightfit train ARGUMENTS` on as many processes as the job has ranks; returns when all have ended well.

    Asked to stop, it has all of them save and stop, and returns the signal it was asked by.
    """
    ranks = job.layout.ranks
    if choose_device(job.device).type == "cuda" and torch.cuda.device_count() < ranks:
        raise UserError(
            f"the job's layout has {ranks} ranks, but this machine has {torch.cuda.device_count()} GPUs; "
            "change the layout, use --nodes or set device=cpu"
        )
    if restarts and "--resume" not in arguments:
        arguments = [*arguments, "--resume"]
    return run_processes([sys.executable, "-m", "tightfit", "train", *arguments], ranks, restarts, job.output)


def run_processes(command: list[str], processes: int, restarts: int, run: Path) -> int | None:
    """Start `command` once per rank; a rank that fails is named, with what can be resumed from."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=restarts, monitor_interval=0.2,
    )  # fmt: skip
    try:
        elastic_launch(config, command[0])(*command[1:])
    except SignalException as stopped:  # the agent has passed it on and waited for the ranks
        return int(stopped.sigval)
    except ChildFailedError as error:
        rank, failure = _cause(error)
        raise UserError(
            f"rank {rank} ended with {_ending(failure)}, and the other ranks with it; {what_is_safe(run)}; "
            "add --resume to go on"
        ) from None
    return None


def _cause(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that died, where others were seen to fail in the same moment because of it; else the first to fail."""
    died = [rank for rank, failure in error.failures.items() if -failure.exitcode in DEATHS]
    return (died[0], error.failures[died[0]]) if died else error.get_first_failure()


def _ending(failure: ProcessFailure) -> str:
    if failure.exitcode >= 0:
        return f"exit code {failure.exitcode}"
    return f"signal {-failure.exitcode} ({failure.signal_name()})"
