"""Processes of this machine that run one function together, for work that torchrun was not asked to start.

One process per GPU where there are enough of them, else processes on the CPU that talk over gloo. They meet through a
file of their own, so nothing else on the machine can be in the way. The first one's answer comes back; the first
failure ends all of them.
"""

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from tightfit.errors import UserError
from tightfit.parallel.mesh import BACKENDS, TIMEOUT

ANSWER, MEETING, REFUSAL = "answer", "meeting", "refusal"


def run_together(world: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(device, *arguments)` returns on the first of `world` new processes of one group."""
    kind = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= world else "cpu"
    with tempfile.TemporaryDirectory(prefix="tightfit-") as folder:
        try:
            spawn(_run, (world, kind, folder, function, arguments), nprocs=world)
        except ProcessRaisedException:
            refusal = Path(folder) / REFUSAL
            if refusal.is_file():
                raise UserError(refusal.read_text(encoding="utf-8")) from None
            raise
        except ProcessExitedException as error:
            how = error.signal_name or f"exit code {error.exit_code}"
            raise UserError(
                f"process {error.error_index} of {world} was ended by {how}, perhaps for want of memory; free some or "
                "take a smaller model"
            ) from None
        return pickle.loads((Path(folder) / ANSWER).read_bytes())  # our own process wrote it


def _run(
    rank: int, world: int, kind: str, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // world))
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    meeting = f"file://{Path(folder) / MEETING}"
    dist.init_process_group(BACKENDS[kind], init_method=meeting, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        answer = function(device, *arguments)
    except UserError as error:
        (Path(folder) / REFUSAL).write_text(str(error), encoding="utf-8")  # any rank's: the others may be waiting
        raise
    if rank == 0:
        (Path(folder) / ANSWER).write_bytes(pickle.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()
