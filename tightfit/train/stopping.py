"""Requests to stop: SIGINT, SIGTERM and SIGHUP let the current step finish and be saved; a second one stops at once.

Signals within SAME_REQUEST_S of the first are the same request: Slurm signals all processes of a job, and a launcher
forwards the signal to its ranks. A signal that was ignored when the run began (nohup) stays ignored.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SAME_REQUEST_S = 2.0
"""Stop signals within this time of the first are one request."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """The signal that this process was sent, if any."""

    def __init__(self, say: Callable[[str], None], last_checkpoint_sentence: Callable[[], str]) -> None:
        self.signal: int | None = None
        self._say, self._last_checkpoint_sentence, self._began = say, last_checkpoint_sentence, 0.0

    def _ask(self, number: int, _: object) -> None:
        if self.signal is not None and time.monotonic() - self._began < SAME_REQUEST_S:
            return
        if self.signal is not None:
            self._say(f"{signal.Signals(number).name} again: stopping at once; {self._last_checkpoint_sentence()}")
            raise KeyboardInterrupt
        self._began, self.signal = time.monotonic(), number
        self._say(f"{signal.Signals(number).name}: finishing the step and saving; once more stops at once")

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside the block, SIGNALS are stop requests; the previous handlers come back after it."""
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, self._ask) for number in heard}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
