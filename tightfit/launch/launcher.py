"""Starting a job's processes on this machine, and ending with one sentence when one of them dies.

One process per rank, forked from a server that has imported the training loop (launch/forked.py), with the environment
variables torchrun would set. When one dies the others are ended (SIGTERM, and after 30 s SIGKILL), the cause is
reported (launch/endings.py), and all are started again where restarts are allowed and the cause was not the user's
mistake. SIGINT, SIGTERM and SIGHUP are passed on: ranks finish their step, save and stop, within the same 30 s. Ranks
that wait for a dead one in a collective are ended that way or by the collective's own timeout (parallel/mesh.py).
torch's elastic agent can fork too, but then reports one failure only, which may be that of a rank that lost the dead
one.

Ranks rendezvous at a TCPStore that other machines cannot reach: torch's store has no password, and by default it
listens on every network. Several machines need the line of `torchrun_line` on each of them, or Slurm
(exports/launch.py).
"""

import os
import shlex
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tightfit.counted import counted
from tightfit.errors import UserError
from tightfit.exports.launch import torchrun
from tightfit.jobs.job import Job
from tightfit.launch.endings import Ending, cause, ending_kept, read_ending, sentence, stop_signal
from tightfit.launch.forked import STOPPING, TRAINING, Forked
from tightfit.launch.stopped import StoppedRanks
from tightfit.launch.together import share_threads
from tightfit.models.resolve import checkpoints_of
from tightfit.train.checkpoints.directory import last_checkpoint_sentence
from tightfit.train.precision import choose_device

LOOK_S = 0.2
"""The longest time between two checks for a stop request."""
LOOPBACK = "127.0.0.1"
Train = Callable[[list[str]], None]
"""The function that a rank calls with the arguments of `tightfit train`."""


def torchrun_line(ranks: int, nodes: int, head: str, arguments: list[str]) -> str:
    """The command to run on each of `nodes` machines; `head` is one of them that all others can reach."""
    if nodes < 1 or ranks % nodes:
        raise UserError(f"the job's layout has {ranks} ranks, which {nodes} nodes cannot share evenly; change one")
    return f"{torchrun(nodes, ranks // nodes, shlex.quote(head))} {shlex.join(arguments)}"


def launch(job: Job, arguments: list[str], start: list[str], restarts: int, train: Train) -> int | None:
    """Call `train` with `arguments` and `start` on as many processes as the job has ranks; returns when all ended well.

    `start` is how the run begins (`--resume`, `--overwrite`, …). Restarted ranks resume from a checkpoint that this
    launch has made; until there is one they begin as at first. On a stop signal all ranks save and stop, and the
    signal's number is returned.
    """
    refuse_missing_gpus(job)
    before = _identities(job.output)

    def given(attempt: int) -> Sequence[Any]:
        return train, [*arguments, *_start(start, attempt, has_saved=bool(_identities(job.output) - before))]

    return run_processes(_train, given, job.layout.ranks, restarts, job.output)


def refuse_missing_gpus(job: Job) -> None:
    """Refuse a job with more ranks than this machine has GPUs."""
    ranks = job.layout.ranks
    if choose_device(job.device).type == "cuda" and torch.cuda.device_count() < ranks:
        raise UserError(
            f"the job's layout has {ranks} ranks, but this machine has "
            f"{counted(torch.cuda.device_count(), 'GPU')}; change the layout, use --nodes or set device=cpu"
        )


def _identities(run: Path) -> set[tuple[str, int, int]]:
    """(name, inode, time of change) of a run's checkpoints: a checkpoint that is written again gets a new identity."""
    return {(path.name, (stat := path.stat()).st_ino, stat.st_mtime_ns) for path in checkpoints_of(run)}


def _start(start: list[str], attempt: int, *, has_saved: bool) -> list[str]:
    """The options with which attempt `attempt` begins."""
    if attempt == 0:
        return start
    return ["--resume"] if has_saved else start or ["--resume-auto"]


def _train(train: Train, arguments: list[str]) -> None:
    if torch.cuda._is_in_bad_fork():  # a module that the server imported opened the GPU: unusable after a fork
        os.execv(sys.executable, [sys.executable, "-m", "tightfit", "train", *arguments])
    train(arguments)


def run_processes(
    function: Callable[..., None], arguments: Callable[[int], Sequence[Any]], world: int, restarts: int, run: Path
) -> int | None:
    """Call `function(*arguments(attempt))` once per rank; errors name the failed rank and the last good checkpoint."""
    with _requests() as asked:
        for attempt in range(restarts + 1):
            endings = _attempt(attempt, function, arguments(attempt), world, asked)
            if asked:
                return asked[0]
            if not any(ending.exit_code or ending.stopped_s for ending in endings):
                return None
            if (number := stop_signal(endings)) is not None:
                return number
            found = cause(endings)
            if found.would_repeat or attempt == restarts:
                break
            print(f"tightfit: {sentence(found, last_checkpoint_sentence(run))}; starting again", file=sys.stderr)
    if found.failure is not None:
        print(found.failure, file=sys.stderr, end="")
    advice = "; add --resume to go on" if checkpoints_of(run) and not found.would_repeat else ""
    raise UserError(sentence(found, last_checkpoint_sentence(run)) + advice)


@contextmanager
def _requests() -> Iterator[list[int]]:
    """Yield a list to which stop signals append their numbers inside the block."""
    asked: list[int] = []
    heard = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]  # nohup stays so
    previous = {number: signal.signal(number, lambda number, _: asked.append(number)) for number in heard}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _attempt(
    attempt: int, function: Callable[..., None], arguments: Sequence[Any], world: int, asked: list[int]
) -> list[Ending]:
    """Run all ranks until they have ended; returns how each of them ended."""
    with tempfile.TemporaryDirectory(prefix="tightfit-launch-") as folder:
        store = loopback_store()  # a new one per attempt
        given = (_environment(attempt, world, store.port), folder, function, *arguments)
        stopped = StoppedRanks()
        with Forked(world, _rank, given, TRAINING) as processes:
            while not asked and not processes.failures and processes.wait(LOOK_S):
                if (rank := stopped.look(processes.pids)) is not None:
                    with suppress(ProcessLookupError):
                        os.kill(processes.pids[rank], signal.SIGKILL)
                    break
            processes.stop(signal.SIGINT if signal.SIGINT in asked else signal.SIGTERM)
        codes = [process.exitcode or 0 for process in processes.processes]
        long = {rank: seconds for rank, seconds in stopped.seconds.items() if codes[rank] == -signal.SIGKILL}
        return [
            read_ending(
                Path(folder),
                rank,
                code,
                killed_by_launcher=rank in processes.killed or rank in long,
                stopped_s=long.get(rank, 0.0),
            )
            for rank, code in enumerate(codes)
        ]


def loopback_store() -> TCPStore:
    """The store at which ranks of this machine rendezvous, on a port that other machines cannot reach."""
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _environment(attempt: int, world: int, port: int) -> dict[str, str]:
    """The environment variables that torchrun sets, and torch and DeepSpeed read."""
    numbers = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    numbers |= {"MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": attempt}
    words = {
        "MASTER_ADDR": LOOPBACK,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
    }
    if Path("/sys/class/net/lo").exists():
        words["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return {name: str(value) for name, value in numbers.items()} | words


def _rank(rank: int, environment: dict[str, str], folder: str, function: Callable[..., None], *arguments: Any) -> None:
    os.environ.update(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    share_threads(int(environment["WORLD_SIZE"]))
    with ending_kept(Path(folder), rank):
        function(*arguments)
