"""Measuring what steps take on a CPU by so little work that a test may."""

import pytest

from tightfit.serve import cpu_timing


def measure_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices, few of them, and few steps."""
    sizes = {"OUTPUTS": 256, "INPUTS": 128, "BEYOND_CACHES_BYTES": 2**18, "ROWS": (1, 8, 64), "ROUNDS": 2, "STEPS": 8}
    for name, size in (sizes | {"TOKENS": 32, "LENGTH": 64}).items():
        monkeypatch.setattr(cpu_timing, name, size)
