"""What the host has free: what the kernel says is available, and what a container may still take, whichever is less.

`MemAvailable` counts what programs could get without swapping, caches that can be dropped included. Inside a container
it is the whole machine's; the control group's limit, less what the group uses beyond droppable files, is then what
counts (version 2 of the interface, and version 1 as older systems have it).
"""

import re
from pathlib import Path

MEMINFO, GROUPS = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Limit, use and statistics of a group, with the name of droppable files in those."""


def free_host_bytes(meminfo: Path = MEMINFO, groups: Path = GROUPS) -> int | None:
    """Bytes that a program could take now; None where nobody says (macOS, Windows)."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read(meminfo), flags=re.MULTILINE)
    known = [int(match[1]) * 1024] if match else []
    known += [free for files in FILES if (free := _group_free_bytes(groups, files)) is not None]
    return min(known) if known else None


def _group_free_bytes(groups: Path, files: tuple[str, str, str, str]) -> int | None:
    limit, used, statistics, droppable = (_read(groups / files[0]), _read(groups / files[1]), _read(groups / files[2]),
                                          files[3])  # fmt: skip
    if not limit.strip().isdigit() or not used.strip().isdigit():  # `max` where there is no limit
        return None
    match = re.search(rf"^{droppable} (\d+)$", statistics, flags=re.MULTILINE)
    return max(0, int(limit) - int(used) + (int(match[1]) if match else 0))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
