"""How the ranks of a run ended, and which of them was the cause.

When one rank ends, ranks that communicate with it fail too, a moment later and with tracebacks of their own: noise. So
a rank does not print its error but writes it to a folder, with the time, and the launcher reports the cause alone:

    1. a rank that was ended by a signal which the launcher did not send (killed, a segmentation fault)
    2. a rank that was found stopped (SIGSTOP)
    3. a rank that refused the user's input (UserError): its sentence, and no restart
    4. where ranks timed out: the rank that did not answer
    5. the rank whose own error came first
The result does not depend on which ending the launcher sees first.
"""

import json
import re
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
TIMED_OUT = re.compile(r"\btime(?:d[ -])?out")
"""In the message of an error, after its name: "timed out", "timeout"."""
REFUSED, OUT_OF_MEMORY = 2, 3
"""Exit codes of `tightfit train` that a restart would only repeat."""


@dataclass(frozen=True)
class Ending:
    """How one rank ended."""

    rank: int
    exit_code: int
    """Negative for a signal: minus its number."""
    killed_by_launcher: bool = False
    """Whether the launcher killed the rank, as it did not stop when asked."""
    stopped_s: float = 0.0
    """Seconds for which the rank was found stopped (SIGSTOP)."""
    refusal: str | None = None
    """The sentence of its UserError."""
    failure: str | None = None
    """The traceback of any other error."""
    at: float = 0.0
    """When it failed, in seconds of `time.time`."""

    @property
    def has_died(self) -> bool:
        """Whether a fatal signal that the launcher did not send ended the rank."""
        return -self.exit_code in DEATHS and not self.killed_by_launcher

    @property
    def would_repeat(self) -> bool:
        """Whether a restart would end in the same way: a mistake in the user's input, or too little memory."""
        return self.refusal is not None or self.exit_code in (REFUSED, OUT_OF_MEMORY)


@contextmanager
def ending_kept(folder: Path, rank: int) -> Iterator[None]:
    """Context around a rank's work: an error is written to `folder` instead of printed, and becomes an exit code."""
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
    folder: Path, rank: int, exit_code: int, *, killed_by_launcher: bool = False, stopped_s: float = 0.0
) -> Ending:
    """The ending of rank `rank`, with the error it left in `folder`, if any."""
    file = folder / f"rank-{rank}.json"
    kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return Ending(rank, exit_code, killed_by_launcher=killed_by_launcher, stopped_s=stopped_s, **kept)


def cause(endings: list[Ending]) -> Ending:
    """The ending that caused the others."""
    unasked = [each for each in endings if not each.killed_by_launcher]
    if dead := [each for each in endings if each.has_died]:
        return min(dead, key=lambda each: each.rank)
    if stopped := [each for each in endings if each.stopped_s]:
        return stopped[0]
    if refused := [each for each in unasked if each.would_repeat]:
        return min(refused, key=lambda each: (each.refusal is None, each.at))
    failed = sorted((each for each in unasked if each.failure), key=lambda each: each.at)
    silent = [each for each in endings if each.killed_by_launcher]
    if silent and failed and TIMED_OUT.search((failed[0].failure or "").lower().rpartition("error")[2]):
        return silent[0]
    return failed[0] if failed else min(unasked or endings, key=_oddity)


def _oddity(ending: Ending) -> tuple[bool, bool, int]:
    """Sort key: nonzero exit codes first, then signals, then ranks that ended well."""
    return ending.exit_code == 0, ending.exit_code < 0, ending.rank


def stop_signal(endings: list[Ending]) -> int | None:
    """The stop signal that was sent to the ranks directly, where all of them stopped in good order; else None."""
    codes = {ending.exit_code for ending in endings}
    asked = {128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    return max(codes) - 128 if len(codes) == 1 and codes <= asked else None


def sentence(ending: Ending, safe: str) -> str:
    """The error message for the cause; `safe` says what can be resumed from. A refusal is its own message."""
    if ending.refusal is not None:
        return ending.refusal
    if ending.stopped_s:
        how = f"was stopped (SIGSTOP) for {ending.stopped_s:.0f} s and has been ended"
    elif ending.killed_by_launcher:
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
