"""Processes of this machine that are forked from one server, so that their modules are imported once.

Importing torch and the training loop takes seconds of a core; forked ranks start, and restart, in a fraction of a
second, and share those memory pages. The server is Python's own (`multiprocessing`'s forkserver): a process that
imports, opens no GPU and computes nothing, so its forks may do both. There is one per program, which keeps the imports
of its first start. Some packages open the GPU when they are imported (torchao, which transformers imports where it is
installed): forks of such a server could not use the GPU, so processes are then spawned instead.

A signal to all processes of a job (scancel, systemd) must not end the server, which reports how its forks ended: stop
signals are blocked in the server and unblocked in its forks (launch/reachable.py). Each forked process has a session of
its own, so that it gets Ctrl-C once, from its parent; if the parent has died, it gets SIGTERM instead. The server ends
with the last forked process.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver, resource_tracker
from types import TracebackType
from typing import Any, Self

Target = Callable[..., None]
STOPPING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
REACHABLE, SETTLED = "tightfit.launch.reachable", "tightfit.launch.settled"
"""Modules that the server imports before and after all others."""
TRAINING = ("tightfit.train.loop", "transformers.models.auto.tokenization_auto", "tightfit.report.run")
"""Modules that a training rank imports; as names, so that the server can import them before this process does."""
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
"""Device files, one of which exists where there is a GPU."""
OPENED = 3
"""Exit code of the probe process (`_has_opened_gpu`) if the server had opened the GPU."""
PATIENCE_S = 30.0
"""How long processes may take to stop when asked: a step, and a checkpoint."""


def start_server(modules: Sequence[str]) -> None:
    """Start a server that imports `modules` in the background; one that runs already is left as it is."""
    multiprocessing.set_forkserver_preload([REACHABLE, *modules, SETTLED])
    resource_tracker.ensure_running()  # before signals are blocked, as this unblocks them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Forked:
    """A context in which `world` processes each call `target(rank, *arguments)`; processes that still run at its end
    are ended."""

    def __init__(
        self, world: int, target: Target, arguments: Sequence[Any], modules: Sequence[str], *, fresh: bool = False
    ) -> None:
        """`fresh` processes are spawned, and import all modules themselves: needed where the server opened the GPU."""
        if not fresh:
            start_server(modules)
            fresh = any(map(os.path.exists, GPU_FILES)) and _has_opened_gpu()
        self.killed: set[int] = set()
        """Ranks that were killed, as they did not stop when asked."""
        context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
        self.processes = [context.Process(target=_begin, args=(target, rank, *arguments)) for rank in range(world)]

    def wait(self, limit_s: float | None = None) -> bool:
        """Block until a running process ends, or `limit_s` have passed; returns whether any still runs."""
        if running := self.running:  # waiting for an empty list would never return
            connection.wait([process.sentinel for process in running], limit_s)
        return bool(self.running)

    @property
    def running(self) -> list[Any]:
        """Processes that have started and not ended."""
        return [process for process in self.processes if process.pid is not None and process.exitcode is None]

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of running processes, by rank."""
        return {self.processes.index(process): process.pid for process in self.running}

    @property
    def failures(self) -> dict[int, int]:
        """Exit codes other than 0, by rank; minus the signal's number for a signal."""
        return {rank: process.exitcode for rank, process in enumerate(self.processes) if process.exitcode}

    def failures_known_after(self, limit_s: float) -> dict[int, int]:
        """`failures`, as soon as one is a signal's, all processes have ended, or `limit_s` have passed.

        The other ranks notice a killed one through their connections, and this process through the server: failures
        that the death causes may be known before the death itself.
        """
        until_s = time.monotonic() + limit_s
        while min(self.failures.values()) > 0 and (left := until_s - time.monotonic()) > 0 and self.wait(left):
            pass
        return self.failures

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send running processes the signal `number`, and kill those that still run after PATIENCE_S."""
        for process in self.running:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(process.pid, number)
        limit = time.monotonic() + PATIENCE_S
        while self.running and (left := limit - time.monotonic()) > 0:
            self.wait(left)
        for process in self.running:
            self.killed.add(self.processes.index(process))
            process.kill()
            process.join()

    def __enter__(self) -> Self:
        try:
            for process in self.processes:
                process.start()
        except BaseException:  # Ctrl-C after some have started: Python would wait for them at exit
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _has_opened_gpu() -> bool:
    """Whether a module that the server imported has opened the GPU; a forked process finds out."""
    asked = multiprocessing.get_context("forkserver").Process(target=_tell_whether_opened)
    asked.start()
    asked.join()
    return asked.exitcode == OPENED


def _tell_whether_opened() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():
        sys.exit(OPENED)


def _begin(target: Target, rank: int, *arguments: Any) -> None:
    os.setsid()
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    target(rank, *arguments)


def _stop_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
