"""Compressing that is killed by the kernel, at whatever instant, ends as one that nobody disturbed."""

from pathlib import Path

import pytest

from tests.covering import sampled, thorough
from tests.fuzz.killed_compression import OF_METHOD, kill_and_resume, write_materials


@sampled(2)
@pytest.mark.parametrize(
    ("method", "kills"), [("gptq", 3), ("fit", 2), *(thorough(method, 15) for method in OF_METHOD)]
)
def test_sigkill_at_any_instant(method: str, kills: int, tmp_path: Path) -> None:
    write_materials(tmp_path)
    assert sum(kill_and_resume(tmp_path, method, kills, seed=3).values()) == kills
