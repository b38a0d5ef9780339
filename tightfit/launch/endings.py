"""How the ranks of a run ended, and which of them was the cause.

When one rank ends, those that talk to it fail too, a moment later and with tracebacks of their own: noise. So a rank
does not print how it failed but leaves it in a folder, with the time, and who started it tells of the cause alone:

    1. a rank that was ended by a signal which nobody here sent (killed, a segmentation fault)
    2. a rank that was found stopped (SIGSTOP)
    3. a rank that refused what the user gave: its sentence, and no restart
    4. where ranks gave up waiting: the one that did not answer
    5. the rank whose own error came first
None of it depends on which end is seen first.
"""

import json
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tightfit.errors import UserError

DEATHS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE)
"""Signals that end a process from outside or by a fault of its own."""
REFUSED, OUT_OF_MEMORY = 2, 3
"""Exit codes of `tightfit train` that a restart would only repeat."""


@dataclass(frozen=True)
class Ending:
    """How one rank ended."""

    rank: int
    exit_code: int
    """A signal's number below zero."""
    was_killed_here: bool = False
    """Whether it had to be killed because it did not stop when asked."""
    stopped_s: float = 0.0
    """For how long it was found stopped (SIGSTOP)."""
    refusal: str | None = None
    failure: str | None = None
    """The traceback of its error."""
    at: float = 0.0
    """When it failed."""

    @property
    def has_died(self) -> bool:
        """Whether something outside ended it."""
        return -self.exit_code in DEATHS and not self.was_killed_here

    @property
    def is_user_s(self) -> bool:
        """Whether it would end like this again: a mistake in what was given, or too little memory."""
        return self.refusal is not None or self.exit_code in (REFUSED, OUT_OF_MEMORY)


@contextmanager
def ending_kept(folder: Path, rank: int) -> Iterator[None]:
    """Inside a rank: what it fails with is left in `folder` and not printed."""
    try:
        yield
    except UserError as error:
        _keep(folder, rank, refusal=str(error))
        raise SystemExit(REFUSED) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception:
        _keep(folder, rank, failure=traceback.format_exc())
        raise SystemExit(1) from None


def _keep(folder: Path, rank: int, **what: str) -> None:
    partial = folder / f"rank-{rank}.part"
    partial.write_text(json.dumps({"at": time.time(), **what}), encoding="utf-8")
    partial.rename(folder / f"rank-{rank}.json")


def read_ending(
    folder: Path, rank: int, exit_code: int, *, was_killed_here: bool = False, stopped_s: float = 0.0
) -> Ending:
    """What is known of rank `rank`."""
    file = folder / f"rank-{rank}.json"
    kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return Ending(rank, exit_code, was_killed_here=was_killed_here, stopped_s=stopped_s, **kept)


def cause(endings: list[Ending]) -> Ending:
    """The one that made the others end."""
    unasked = [each for each in endings if not each.was_killed_here]
    if dead := [each for each in endings if each.has_died]:
        return min(dead, key=lambda each: each.rank)
    if stopped := [each for each in endings if each.stopped_s]:
        return stopped[0]
    if refused := [each for each in unasked if each.is_user_s]:
        return min(refused, key=lambda each: (each.refusal is None, each.at))
    failed = sorted((each for each in unasked if each.failure), key=lambda each: each.at)
    silent = [each for each in endings if each.was_killed_here]
    if silent and failed and "time" in (failed[0].failure or "").lower().rpartition("error")[2]:
        return silent[0]
    return failed[0] if failed else min(unasked or endings, key=_oddity)


def _oddity(ending: Ending) -> tuple[bool, bool, int]:
    """Sorts those with an exit code of their own first, then those ended by a signal, then those that ended well."""
    return ending.exit_code == 0, ending.exit_code < 0, ending.rank


def stop_signal(endings: list[Ending]) -> int | None:
    """The signal by which somebody asked the ranks themselves to stop, which they all did in good order."""
    codes = {ending.exit_code for ending in endings}
    asked = {128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    return max(codes) - 128 if len(codes) == 1 and codes <= asked else None


def sentence(ending: Ending, safe: str) -> str:
    """What to tell of the cause; `safe` says what can be resumed from. A refusal stands for itself."""
    if ending.refusal is not None:
        return ending.refusal
    if ending.stopped_s:
        how = f"was stopped (SIGSTOP) for {ending.stopped_s:.0f} s and has been ended"
    elif ending.was_killed_here:
        how = "did not answer, the others gave up waiting for it, and it has been ended"
    elif ending.failure is not None:
        how = f"failed with {ending.failure.strip().splitlines()[-1]} (traceback above)"
    else:
        how = f"ended with {exit_name(ending.exit_code)}"
    return f"rank {ending.rank} {how}, and the other ranks with it; {safe}"


def exit_name(exit_code: int) -> str:
    """An exit code in words."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    return f"signal {-exit_code} ({signal.Signals(-exit_code).name})"
