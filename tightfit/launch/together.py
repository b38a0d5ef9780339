"""Processes of this machine that run one function together, for work that torchrun was not asked to start.

One process per GPU where there are enough of them, else processes on the CPU that talk over gloo. They meet through a
file of their own, so nothing else on the machine can be in the way. The first one's answer comes back; the first
failure ends all of them. On the CPU they are forked (launch/forked.py); with GPUs each imports for itself, as a
program that calls this may have had its server import something that opened one.
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
"""How often a process that was stopped is looked for."""
KNOWN_S = 2.0
"""How much later than the failures it causes the death of a process may be known."""
ANSWER, MEETING, REFUSAL, FAILURE = "answer", "meeting", "refusal", "failure"


def run_together(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    modules: Sequence[str] = (),
    limit_s: float = float("inf"),
) -> Any:
    """What `function(device, *arguments)` returns on the first of `world` new processes of one group.

    `modules` are imported before the processes are forked, and that of the function with them. Processes that take
    longer than `limit_s` are ended.
    """
    until_s = time.monotonic() + limit_s
    kind = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= world else "cpu"
    imported = [name for name in (function.__module__, *modules) if name != "__main__"]  # each looks at a script itself
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
    """What to tell of processes that failed: what one of them refused, the traceback of one, or how it was ended."""
    if (refusal := folder / REFUSAL).is_file():
        return UserError(refusal.read_text(encoding="utf-8"))
    rank, code = min(failures.items(), key=lambda item: item[1])  # one ended by a signal, before those that miss it
    if code == 1 and (failure := folder / FAILURE).is_file():
        return RuntimeError(failure.read_text(encoding="utf-8"))
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return UserError(
        f"process {rank} of {world} was ended by {how}, perhaps for want of memory; free some or take a smaller model"
    )


def share_threads(world: int) -> None:
    """Threads of this process, one of `world` on the machine, where nobody has said how many it has."""
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
