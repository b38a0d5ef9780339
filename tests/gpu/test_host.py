"""Pinned pages: counted to the byte, pinned for CUDA, huge where the kernel gives such, and released."""

import gc
import re
from pathlib import Path

import pytest
import torch

from tightfit.memory.host import host_empty, pinned_bytes

CUDA = torch.device("cuda")
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SHAPE = (1000, 70_001)
"""Of 267 MiB in float32: half a GiB where sizes are rounded to powers of two."""


def test_pages_are_pinned_counted_and_released() -> None:
    before = pinned_bytes()
    made = host_empty(SHAPE, torch.float32, CUDA)
    assert made.is_pinned()
    assert pinned_bytes() - before == 4 * 1000 * 70_001
    there = torch.full(SHAPE, 3.0, device=CUDA)
    made.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert bool((made == 3.0).all())
    part = made[10:20]
    del made
    gc.collect()
    assert pinned_bytes() > before  # a view keeps them
    del part
    gc.collect()
    assert pinned_bytes() == before


@pytest.mark.skipif("[never]" in (HUGE.read_text() if HUGE.exists() else "[never]"), reason="no huge pages here")
def test_pages_are_huge() -> None:
    """Nine tenths of them: the ends of a mapping need not be aligned."""
    made = host_empty(SHAPE, torch.float32, CUDA)
    listed = Path("/proc/self/smaps").read_text(encoding="utf-8")
    found = [
        int(match[3]) * 1024
        for match in re.finditer(r"^(\w+)-(\w+) \S{4} .*?^AnonHugePages: *(\d+) kB$", listed, re.MULTILINE | re.DOTALL)
        if int(match[1], 16) <= made.data_ptr() + made.nbytes // 2 < int(match[2], 16)
    ]
    assert found[0] > 0.9 * made.nbytes
