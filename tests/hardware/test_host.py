"""Free host memory: the kernel's word, and a container's limit where that is tighter."""

from pathlib import Path

import pytest

from tightfit.hardware.host import free_host_bytes

MEMINFO = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:    9000000 kB\n"
V2 = {
    "memory.max": "6000000000\n",
    "memory.current": "5000000000\n",
    "memory.stat": "anon 1\nfile 2\ninactive_file 700000000\n",
}
V1 = {
    "memory/memory.limit_in_bytes": "6000000000\n",
    "memory/memory.usage_in_bytes": "5000000000\n",
    "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 200000000\n",
}


def free(folder: Path, files: dict[str, str], meminfo: str = MEMINFO) -> int | None:
    (folder / "meminfo").write_text(meminfo)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return free_host_bytes(folder / "meminfo", folder)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 9_000_000 * 1024),
        (V2, 1_700_000_000),
        (V1, 1_200_000_000),
        (V2 | {"memory.max": "max\n"}, 9_000_000 * 1024),
        (V2 | {"memory.max": "99000000000\n"}, 9_000_000 * 1024),
        (V2 | {"memory.current": "9000000000\n", "memory.stat": ""}, 0),
    ],
)
def test_the_tighter_of_machine_and_container(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert free(tmp_path, files) == expected


def test_where_nobody_says(tmp_path: Path) -> None:
    assert free(tmp_path, {}, meminfo="MemTotal: 5 kB\n") is None
    assert free_host_bytes(tmp_path / "no", tmp_path / "none") is None


def test_this_machine() -> None:
    found = free_host_bytes()
    assert found is None or 2**20 < found < 2**50
