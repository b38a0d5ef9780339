"""Processes of this machine that run one function as a process group, without torchrun.

One process per GPU where there are enough GPUs, else CPU processes over gloo. They rendezvous through a file of their
own, so no other program can interfere. The result of rank 0 is returned; the first failure ends all processes. CPU
processes are forked (launch/forked.py); with GPUs they are spawned, as the calling program's server may have imported
a module that opened a GPU.
"""

import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tightfit.errors import UserError
from tightfit.launch.forked import Forked
from tightfit.launch.stopped import StoppedRanks
from tightfit.parallel.mesh import BACKENDS, TIMEOUT

LOOK_S = 1.0
"""Time between two checks for a stopped process."""
KNOWN_S = 2.0
"""How long after the failures it causes the death of a process may become known."""
ANSWER, MEETING, REFUSAL, FAILURE = "answer", "meeting", "refusal", "failure"


def run_together(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    modules: Sequence[str] = (),
    limit_s: float = float("inf"),
) -> Any:
    """The result of `function(device, *arguments)` on rank 0 of `world` new processes of one group.

    `modules` and the function's own are imported before the processes are forked. Processes that take longer than
    `limit_s` are ended.
    """
    until_s = time.monotonic() + limit_s
    kind = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= world else "cpu"
    imported = [name for name in (function.__module__, *modules) if name != "__main__"]  # each process runs a script
    with tempfile.TemporaryDirectory(prefix="tightfit-") as folder:
        given = (world, kind, folder, function, arguments)
        with Forked(world, _run, given, imported, fresh=kind == "cuda") as processes:
            stopped = StoppedRanks()
            while not processes.failures and processes.wait(LOOK_S):
                if time.monotonic() > until_s:
                    raise UserError(f"{world} processes were not done after {limit_s:.0f} s, so all were ended")
                if (rank := stopped.look(processes.pids)) is not None:
                    with suppress(ProcessLookupError):
                        os.kill(processes.pids[rank], signal.SIGKILL)
                    raise UserError(f"process {rank} of {world} was stopped (SIGSTOP), so all were ended; run it again")
            if processes.failures:
                raise _failure(Path(folder), world, processes.failures_known_after(KNOWN_S))
        return pickle.loads((Path(folder) / ANSWER).read_bytes())  # our own process wrote it


def _failure(folder: Path, world: int, failures: dict[int, int]) -> Exception:
    """The error to raise for failed processes: a rank's UserError, a rank's traceback, or the signal that ended one."""
    if (refusal := folder / REFUSAL).is_file():
        return UserError(refusal.read_text(encoding="utf-8"))
    rank, code = min(failures.items(), key=lambda item: item[1])  # signals first: other failures follow from them
    if code == 1 and (failure := folder / FAILURE).is_file():
        return RuntimeError(failure.read_text(encoding="utf-8"))
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return UserError(
        f"process {rank} of {world} was ended by {how}, perhaps for want of memory; free some or take a smaller model"
    )


def share_threads(world: int) -> None:
    """Give this process, one of `world` on the machine, its share of threads, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // world))


def _run(
    rank: int, world: int, kind: str, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    share_threads(world)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    meeting = f"file://{Path(folder) / MEETING}"
    dist.init_process_group(BACKENDS[kind], init_method=meeting, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        answer = function(device, *arguments)
    except UserError as error:
        (Path(folder) / REFUSAL).write_text(str(error), encoding="utf-8")  # any rank's: the others may be waiting
        raise SystemExit(1) from None
    except Exception:
        with suppress(FileExistsError), (Path(folder) / FAILURE).open("x", encoding="utf-8") as file:
            file.write(f"process {rank} of {world} failed:\n{traceback.format_exc()}")
        raise SystemExit(1) from None
    if rank == 0:
        (Path(folder) / ANSWER).write_bytes(pickle.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()
