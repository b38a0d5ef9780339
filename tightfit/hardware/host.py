"""Free host memory: the lesser of the memory that the kernel reports as available and the container's remaining limit.

`MemAvailable` is the memory that programs can allocate without swapping, reclaimable page cache included, but of the
whole machine. Inside a container the cgroup's limit counts, less its usage without reclaimable file cache (cgroup v2,
and v1 on older systems).
"""

import re
from pathlib import Path

MEMINFO, GROUPS = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Per cgroup version: files of limit, usage and statistics, and the key of reclaimable file cache in the last."""


def free_host_bytes(meminfo: Path = MEMINFO, groups: Path = GROUPS) -> int | None:
    """Bytes that a program could allocate now; None where unknown (macOS, Windows)."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read(meminfo), flags=re.MULTILINE)
    known = [int(match[1]) * 1024] if match else []
    known += [free for files in FILES if (free := _group_free_bytes(groups, files)) is not None]
    return min(known) if known else None


def _group_free_bytes(groups: Path, files: tuple[str, str, str, str]) -> int | None:
    limit, used, statistics, droppable = (
        _read(groups / files[0]),
        _read(groups / files[1]),
        _read(groups / files[2]),
        files[3],
    )
    if not limit.strip().isdigit() or not used.strip().isdigit():  # `max` where there is no limit
        return None
    match = re.search(rf"^{droppable} (\d+)$", statistics, flags=re.MULTILINE)
    return max(0, int(limit) - int(used) + (int(match[1]) if match else 0))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
