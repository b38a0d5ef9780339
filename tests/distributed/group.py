"""Real processes that talk over gloo, started once and given many functions to run."""

import multiprocessing
import pickle
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d

from tests.set_aside import keep_set_aside
from tightfit.launch.forked import start_server

Function = Callable[..., Any]
PRELOADED = ["tests.preloaded"]
ANSWER_S = 300
"""How long a rank may take: minutes only where the machine has much else to do."""
FAILED_S = 20
"""How long it may take when another has failed, whom it may wait for."""


class Group:
    """`world` processes of one process group; `run` has each of them call a function and returns what they returned."""

    def __init__(self, world: int, meeting: Path) -> None:
        start_server(PRELOADED)
        context = multiprocessing.get_context("forkserver")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world, str(meeting)), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Function, *arguments: Any) -> list[Any]:
        """What `function(*arguments)` returns on every rank, in their order; a failure of any of them fails here."""
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, arguments)))
        answers: list[tuple[bool, Any]] = [(False, "no answer")] * len(self.pipes)
        waiting, until = list(self.pipes), time.monotonic() + ANSWER_S
        while waiting and (ready := wait(waiting, max(0.0, until - time.monotonic()))):
            for pipe in waiting[:]:
                if pipe in ready:
                    waiting.remove(pipe)
                    answers[self.pipes.index(pipe)] = fine, _ = pickle.loads(pipe.recv_bytes())
                    until = until if fine else min(until, time.monotonic() + FAILED_S)
        failed = [f"rank {rank}: {answer}" for rank, (fine, answer) in enumerate(answers) if not fine]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()


def _share_one_device() -> None:
    """Have all of gloo's groups in this process use one device.

    Each would have its own, with a thread that wakes a hundred times a second for as long as the process lives: sixty
    groups take 5 % of a core in each of their processes while nothing happens.
    """
    device = ProcessGroupGloo.create_default_device()

    class Kind(type):
        def __instancecheck__(cls, group: object) -> bool:
            return isinstance(group, ProcessGroupGloo)

    class OnOneDevice(metaclass=Kind):
        def __new__(cls, store: Any, rank: int, size: int, timeout: timedelta, **others: Any) -> Any:
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices, options._threads, options._timeout = [device], 2, timeout
            return ProcessGroupGloo(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnOneDevice  # type: ignore[misc]


def _serve(pipe: Connection, rank: int, world: int, meeting: str) -> None:
    torch.set_num_threads(1)
    keep_set_aside()
    warnings.filterwarnings("error", message="FSDP2-wrapped module .* returned a view tensor")
    _share_one_device()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    while True:
        try:
            function, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = (True, function(*arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
