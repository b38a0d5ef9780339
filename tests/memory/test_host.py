"""Host memory in simulations and measurements: its own place, its own fullest moments, past the GPU's allocator."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.memory import host
from tightfit.memory.allocator import CachingAllocator, PlainAllocator
from tightfit.memory.host import claimed, host_empty, pinned_bytes
from tightfit.memory.ledger import Ledger
from tightfit.memory.measurement import measured
from tightfit.memory.simulation import simulated
from tightfit.memory.trace import Allocation, Trace, ledger_of_replay
from tightfit.memory.tracing import Tracer

CPU = torch.device("cpu")
MIB = 2**20


def swapping(tracer: Tracer) -> list[Tensor]:
    """States on the host; in the step a tensor goes out, comes back into a buffer, and all of it but states ends."""
    tracer.begin("init")
    states = host_empty((MIB,), torch.float32, CPU, "optimizer states")
    weights = claimed(torch.empty(MIB // 4), "weights")
    buffer = claimed(torch.empty(MIB // 8), "communication", "staging")
    tracer.begin_step()
    tracer.begin("forward")
    made = weights * 2
    kept = host_empty((MIB // 4,), torch.float32, CPU, "activations", "offloaded checkpoints")
    kept.copy_(made, non_blocking=True)
    del made
    tracer.begin("backward")
    gradient = claimed(torch.empty(MIB // 8), "gradients")
    buffer.copy_(kept[: MIB // 8])
    del kept, gradient
    return [states, weights, buffer]


def ledger_of_swapping() -> Ledger:
    with simulated() as tracer:
        alive = swapping(tracer)
    assert len(alive) == 3
    return ledger_of_replay(tracer.trace.replay(), "simulation")


def test_each_place_has_its_own_lines() -> None:
    ledger = ledger_of_swapping()
    gpu = {phase: ledger.by_component(phase) for phase in ("init", "forward", "backward")}
    host = {phase: ledger.by_component(phase, place="host") for phase in ("init", "forward", "backward")}
    resident = {"weights": MIB, "communication": MIB // 2}
    for phase, more in (("init", {}), ("forward", {"activations": MIB}), ("backward", {"gradients": MIB // 2})):
        held = {component: count for component, count in gpu[phase].items() if component != "allocator slack"}
        assert held == resident | more, phase
    assert host["init"] == {"optimizer states": 4 * MIB}
    assert host["forward"] == host["backward"] == {"optimizer states": 4 * MIB, "activations": MIB}
    assert ledger.peak_bytes("host") == 5 * MIB
    assert {line.detail for line in ledger.lines if line.place == "host"} == {"offloaded", "offloaded checkpoints"}


def test_host_memory_does_not_reach_the_gpus_allocator() -> None:
    trace = Trace()
    trace.begin("init")
    trace.allocate(Allocation(50 * MIB, "optimizer states", place="host"))
    trace.allocate(Allocation(20 * MIB, "weights"))
    allocator = CachingAllocator(capacity_bytes=30 * MIB)
    replay = trace.replay(allocator)
    assert (replay.peak_allocated_bytes, replay.peak_reserved_bytes) == (20 * MIB, 20 * MIB)
    assert [(m.phase, m.allocated_bytes, m.reserved_bytes) for m in replay.host_peaks] == [("init", 50 * MIB, 50 * MIB)]
    together = trace.replay(PlainAllocator(), apart=False)
    assert together.peak_allocated_bytes == 70 * MIB
    assert together.host_peaks == []


def test_freed_and_repeated_host_memory_is_counted_once() -> None:
    trace = Trace()
    trace.begin("init")
    trace.allocate(Allocation(7, "optimizer states", place="host"))
    trace.step_start = len(trace.events)
    trace.begin("forward")
    first = trace.allocate(Allocation(30, "activations", place="host"))
    trace.begin("backward")
    trace.free(first)
    trace.allocate(Allocation(5, "gradients", place="host"))
    replay = trace.replay(PlainAllocator(), steps=3)
    assert {m.phase: m.allocated_bytes for m in replay.host_peaks} == {"init": 7, "forward": 42, "backward": 12}


def test_on_the_cpu_a_measurement_has_everything_in_one_place() -> None:
    with measured(CPU) as measuring:
        alive = swapping(measuring.tracer)
    ledger = measuring.ledger()
    assert len(alive) == 3
    assert not ledger.moments("gpu")
    assert ledger.allocated_bytes("init", place="host") == 4 * MIB + MIB + MIB // 2
    assert ledger.allocated_bytes("forward", place="host") == 4 * MIB + MIB + MIB // 2 + 2 * MIB


@pytest.mark.parametrize("make", [lambda: host_empty((3, 5), torch.bfloat16, CPU), lambda: torch.empty(3, 5)])
def test_without_a_tracer_they_are_plain_tensors(make: Callable[[], Tensor]) -> None:
    made = claimed(make(), "weights")
    assert (made.shape, made.device, made.is_pinned()) == ((3, 5), CPU, False)
    assert pinned_bytes() == 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what its pages are")
def test_pages_to_pin_are_private_so_that_they_can_be_huge() -> None:
    """As the kernel lists them: of exactly the size asked for in whole pages, not shared, huge pages wanted."""
    size = 8 * MIB + 5
    pages = host._pages(size)
    address = torch.frombuffer(pages, dtype=torch.uint8).fill_(7).data_ptr()
    listed = Path("/proc/self/smaps").read_text(encoding="utf-8")
    found = next(
        (first, last, match[3], match[4])
        for match in re.finditer(r"^(\w+)-(\w+) (\S{4}) .*?^VmFlags: (.*?)$", listed, flags=re.MULTILINE | re.DOTALL)
        if (first := int(match[1], 16)) <= address < (last := int(match[2], 16))
    )
    assert found[2] == "rw-p"
    assert found[1] - address >= size
    assert "hg" in found[3].split()
    assert pages[size - 1] == 7


def test_a_host_that_has_no_such_memory_gets_a_sentence() -> None:
    with pytest.raises(UserError, match=r"no 4294967296\.00 GiB left to offload to .*offload_keep_bytes"):
        host._pages(2**62)
