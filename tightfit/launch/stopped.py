"""Ranks that are stopped (SIGSTOP): alive but silent, while all others wait for them and would time out after minutes.

The kernel knows which processes are stopped (Linux: `T` in /proc/PID/stat), so a stopped rank is named within seconds.
If all ranks are stopped, the job was suspended and nothing is wrong. Time counts only while the launcher itself runs:
when a whole suspended program goes on, no rank is at fault.
"""

import time
from collections.abc import Mapping
from pathlib import Path

STOPPED_S = 20.0
"""How long a rank may be stopped while others run."""
LONGEST_LOOK_S = 1.0


class StoppedRanks:
    """Seconds for which each rank has been found stopped, without a break, while other ranks ran."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self._looked_at = time.monotonic()

    def look(self, pids: Mapping[int, int]) -> int | None:
        """Check the running processes (rank → process id); returns a rank that has been stopped for too long."""
        now = time.monotonic()
        elapsed, self._looked_at = min(now - self._looked_at, LONGEST_LOOK_S), now
        stopped = {rank for rank, pid in pids.items() if is_stopped(pid)}
        if len(stopped) == len(pids):
            stopped = set()
        self.seconds = {rank: self.seconds.get(rank, 0.0) + elapsed for rank in stopped}
        return next((rank for rank, seconds in self.seconds.items() if seconds >= STOPPED_S), None)


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped, by /proc; False where that cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False
