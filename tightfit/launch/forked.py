"""Processes of this machine that are forked from one server, so that what they import is imported once.

Importing torch and the training loop takes seconds of a core; forked ranks start, and start again, in a fraction of
one, and share those pages. The server is Python's own (`multiprocessing`'s forkserver): a process that imports, opens
no GPU and computes nothing, so what it forks may do both. There is one to a program, which keeps the imports it was
first asked for. Some packages open the GPU when they are imported (torchao, which transformers imports where it is
installed): what such a server forks could not use it, so processes are started afresh then.

Who sends a signal to all processes of a job (scancel, systemd) must not end the server, which tells how they ended:
signals that ask to stop are blocked there, and reach what it forks (launch/reachable.py). Each process has a session
of its own, so that Ctrl-C comes to it once, from who started it; when that one has died, SIGTERM comes in its place.
The server ends with the last of them.
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
"""What the server imports before and after all others."""
TRAINING = ("tightfit.train.loop", "transformers.models.auto.tokenization_auto", "tightfit.report.run")
"""What a rank that trains would import: named here, as a program has its server import it before it does so itself."""
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
"""One of them is there where there is a GPU."""
OPENED = 3
"""The exit code of a process that was forked from a server which had opened the GPU."""
PATIENCE_S = 30.0
"""How long processes that were asked to stop may take: a step, and a checkpoint."""


def start_server(modules: Sequence[str]) -> None:
    """Have a server import `modules` now, while we do something else; one that runs already is left as it is."""
    multiprocessing.set_forkserver_preload([REACHABLE, *modules, SETTLED])
    resource_tracker.ensure_running()  # first, as it unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Forked:
    """`with` it, `world` processes that each call `target(rank, *arguments)`; those that still run at its end are
    ended."""

    def __init__(
        self, world: int, target: Target, arguments: Sequence[Any], modules: Sequence[str], *, fresh: bool = False
    ) -> None:
        """`fresh` ones are not forked but import all they need, as those must that find the GPU opened already."""
        if not fresh:
            start_server(modules)
            fresh = any(map(os.path.exists, GPU_FILES)) and _has_opened_gpu()
        self.killed: set[int] = set()
        """Ranks that had to be killed, as they did not stop when they were asked to."""
        context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
        self.processes = [context.Process(target=_begin, args=(target, rank, *arguments)) for rank in range(world)]

    def wait(self, limit_s: float | None = None) -> bool:
        """Until one of those that run has ended, or `limit_s` have passed; whether any still runs."""
        if running := self.running:  # nothing to wait for would be waited for without end
            connection.wait([process.sentinel for process in running], limit_s)
        return bool(self.running)

    @property
    def running(self) -> list[Any]:
        """Processes that have begun and not ended."""
        return [process for process in self.processes if process.pid is not None and process.exitcode is None]

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of those that run, by rank."""
        return {self.processes.index(process): process.pid for process in self.running}

    @property
    def failures(self) -> dict[int, int]:
        """Exit codes other than 0, by rank; a signal's number below zero."""
        return {rank: process.exitcode for rank, process in enumerate(self.processes) if process.exitcode}

    def failures_known_after(self, limit_s: float) -> dict[int, int]:
        """The same, once one of them is a signal's, all have ended, or `limit_s` have passed.

        What a killed process leaves behind reaches the others through their connections, and us through the server:
        theirs may be the failures that are known first.
        """
        until_s = time.monotonic() + limit_s
        while min(self.failures.values()) > 0 and (left := until_s - time.monotonic()) > 0 and self.wait(left):
            pass
        return self.failures

    def end(self, number: int = signal.SIGTERM) -> None:
        """Ask those that run to stop, and after PATIENCE_S end them."""
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
        except BaseException:  # Ctrl-C while some run already, which Python would wait for at its own end
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _has_opened_gpu() -> bool:
    """Whether an import of the server's has."""
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
