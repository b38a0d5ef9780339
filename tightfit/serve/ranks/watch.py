"""Watches the other ranks of a served model: when one ends, so does the server, with a sentence that names it.

Without it only the next request would notice a dead rank, and on GPUs after minutes in a collective. The first rank
sends itself SIGTERM, so that clients hear of it; if it still waits for the dead rank after `GRACE_S`, its process is
ended.
"""

import os
import signal
import sys
import threading
from types import TracebackType
from typing import Self

from tightfit.launch.endings import exit_name
from tightfit.launch.forked import Forked

LOOK_S = 0.2
NOTICE_S = 5.0
"""How long after a failure of the engine to look for a rank that died, which is then the cause."""
GRACE_S = 10.0


class RankWatch:
    """A context manager that watches `processes`, ranks 1 and up."""

    def __init__(self, processes: Forked) -> None:
        self.processes = processes
        self._found, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look, name="ranks", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = error is not None and not isinstance(error, SystemExit | KeyboardInterrupt)
        died = self._found.wait(NOTICE_S if failed else 0)
        self._over.set()
        self._thread.join(LOOK_S * 10)
        if died:
            sys.exit(1)  # the cause has been printed; the engine's error follows from it

    def _look(self) -> None:
        while not self._over.is_set():
            self.processes.wait(LOOK_S)
            ended = [process for process in self.processes.processes if process.exitcode is not None]
            if ended and not self._over.is_set():
                return self._end(self.processes.processes.index(ended[0]) + 1, ended[0].exitcode)

    def _end(self, rank: int, exit_code: int) -> None:
        which = f"rank {rank} of {len(self.processes.processes) + 1}"
        message = f"tightfit: {which} ended with {exit_name(exit_code)}, and the server with it; start it again"
        print(message, file=sys.stderr, flush=True)
        self._found.set()
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)
            if self._over.wait(GRACE_S):
                return
        os._exit(1)  # the other ranks end with their parent
