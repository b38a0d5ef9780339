"""Starting a job's processes on this machine, and ending with one sentence when one of them dies.

One process per rank, forked from a server that has imported the training loop (parallel/forked.py), with the variables
torchrun would give it. When one dies the others are ended (SIGTERM, and after 30 s SIGKILL), and all are started again
where restarts are allowed. SIGINT, SIGTERM and SIGHUP are passed on: ranks finish their step, save and stop, within the
same 30 s. Ranks that wait for a dead one in a collective are ended that way or by the collective's own timeout
(parallel/mesh.py). torch's elastic agent can fork too, but then knows of one failure only, which may be that of a rank
that missed the dead one. Several machines need the line of `torchrun_line` on each of them, or Slurm
(plan/export/launch.py).
"""

import os
import runpy
import shlex
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.parallel.forked import STOPPING, TRAINING, Forked
from tightfit.parallel.processes import share_threads
from tightfit.train.checkpoint import what_is_safe
from tightfit.train.precision import choose_device

PORT = 29500
LOOPBACK = "127.0.0.1"
LOOK_S = 0.2
"""How often a request to stop is looked for, at least."""


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
    return run_processes(train, (arguments,), ranks, restarts, job.output)


def train(arguments: list[str]) -> None:
    """`python -m tightfit train ARGUMENTS`, in a process that has imported it already."""
    if torch.cuda._is_in_bad_fork():  # an import of the server's has opened the GPU, which is no use after a fork
        os.execv(sys.executable, [sys.executable, "-m", "tightfit", "train", *arguments])
    sys.argv = ["tightfit", "train", *arguments]
    runpy.run_module("tightfit", run_name="__main__")


def run_processes(
    function: Callable[..., None], arguments: Sequence[Any], world: int, restarts: int, run: Path
) -> int | None:
    """Call `function(*arguments)` once per rank; a rank that fails is named, with what can be resumed from."""
    culprit: tuple[int, int] | None = None
    with _requests() as asked:
        for attempt in range(restarts + 1):
            culprit = _attempt(attempt, function, arguments, world, asked)
            if asked:
                return asked[0]
            if culprit is None:
                return None
    assert culprit is not None
    rank, code = culprit
    raise UserError(
        f"rank {rank} ended with {_ending(code)}, and the other ranks with it; {what_is_safe(run)}; "
        "add --resume to go on"
    )


@contextmanager
def _requests() -> Iterator[list[int]]:
    """The signals that have asked us to stop, while somebody looks."""
    asked: list[int] = []
    previous = {number: signal.signal(number, lambda number, _: asked.append(number)) for number in STOPPING}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _attempt(
    attempt: int, function: Callable[..., None], arguments: Sequence[Any], world: int, asked: list[int]
) -> tuple[int, int] | None:
    """All ranks until they have ended: the one that failed, if any, and its exit code."""
    store = meeting_place()  # of this attempt
    given = (_environment(attempt, world, store.port), function, *arguments)
    with Forked(world, _rank, given, TRAINING) as processes:
        while not asked and not processes.failures and processes.wait(LOOK_S):
            pass
        failed = bool(processes.failures)
        processes.end(signal.SIGINT if signal.SIGINT in asked else signal.SIGTERM)
        return processes.culprit() if failed else None


def meeting_place() -> TCPStore:
    """Where ranks of this machine meet. Torch would listen on all of its interfaces, to whoever connects."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        port = listening.getsockname()[1]
        return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _environment(attempt: int, world: int, port: int) -> dict[str, str]:
    """What torchrun tells its processes, and torch and DeepSpeed read."""
    numbers = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    numbers |= {"MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": attempt}
    words = {
        "MASTER_ADDR": LOOPBACK,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
    }
    return {name: str(value) for name, value in numbers.items()} | words


def _rank(rank: int, environment: dict[str, str], function: Callable[..., None], *arguments: Any) -> None:
    os.environ.update(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    share_threads(int(environment["WORLD_SIZE"]))
    function(*arguments)


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    return f"signal {-exit_code} ({signal.Signals(-exit_code).name})"
