"""Attributes that the CUDA driver reports of a card that is not in the catalog, and the peaks that follow from them.

    matrix products    multiprocessors × clock × operations a cycle, by compute capability
    float32            multiprocessors × clock × 2 × cores
    bandwidth          2 × memory clock × bus width (every memory since GDDR5 moves data twice a cycle)

The operations per cycle are those that reproduce the data sheets of a generation (dense fp16 products with float32
accumulation; GeForce cards have half). Read through libcuda by ctypes, without importing torch or creating a context.
"""

import ctypes
from dataclasses import dataclass

from tightfit.hardware.accelerator import Accelerator, PeakRates

MULTIPROCESSORS, CLOCK_KHZ, MEMORY_CLOCK_KHZ, BUS_BITS, MAJOR, MINOR = 16, 13, 36, 37, 75, 76
"""Values of the enum CUdevice_attribute."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """FLOPs per cycle and multiprocessor of one compute capability, and the PCIe generation of its cards."""

    fp16: int
    cores: int
    host_link: str
    has_bf16: bool = True
    has_fp8: bool = False


GENERATIONS: dict[tuple[int, int], Generation] = {
    (7, 0): Generation(fp16=1024, cores=64, host_link="pcie3", has_bf16=False),
    (7, 5): Generation(fp16=1024, cores=64, host_link="pcie3", has_bf16=False),
    (8, 0): Generation(fp16=2048, cores=64, host_link="pcie4"),
    (8, 6): Generation(fp16=1024, cores=128, host_link="pcie4"),
    (8, 9): Generation(fp16=1024, cores=128, host_link="pcie4", has_fp8=True),
    (9, 0): Generation(fp16=4096, cores=128, host_link="pcie5", has_fp8=True),
    (10, 0): Generation(fp16=8192, cores=128, host_link="pcie5", has_fp8=True),
    (12, 0): Generation(fp16=1024, cores=128, host_link="pcie5", has_fp8=True),
}


@dataclass(frozen=True, kw_only=True)
class DriverFacts:
    """Attributes of one device."""

    multiprocessors: int
    clock_khz: int
    memory_clock_khz: int
    bus_bits: int
    capability: tuple[int, int]


def driver_facts(device: int = 0) -> DriverFacts | None:
    """Attributes of `device` from libcuda; None where there is no driver or no such device."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    handle = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(handle), device):
        return None

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        return 0 if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, handle) else value.value

    return DriverFacts(
        multiprocessors=attribute(MULTIPROCESSORS),
        clock_khz=attribute(CLOCK_KHZ),
        memory_clock_khz=attribute(MEMORY_CLOCK_KHZ),
        bus_bits=attribute(BUS_BITS),
        capability=(attribute(MAJOR), attribute(MINOR)),
    )


def accelerator_of_driver(name: str, total_mib: int, facts: DriverFacts) -> Accelerator | None:
    """The card that these facts describe; None for generations before Volta, which have no matrix units."""
    earlier = [each for each in GENERATIONS if each <= facts.capability]
    if not earlier:
        return None
    generation = GENERATIONS[max(earlier)]
    cycles = facts.multiprocessors * facts.clock_khz * 1e3 / 1e12
    fp16 = cycles * generation.fp16 * (0.5 if "GEFORCE" in name.upper() else 1.0)
    return Accelerator(
        family=name.replace(" ", "-"),
        memory_gb=round(total_mib * 2**20 / 1e9),
        form="pcie",
        bandwidth_gb_s=2 * facts.memory_clock_khz * 1e3 * facts.bus_bits / 8 / 1e9,
        rates=PeakRates(
            fp32=cycles * 2 * generation.cores,
            fp16=fp16,
            bf16=fp16 if generation.has_bf16 else None,
            fp8=2 * fp16 if generation.has_fp8 else None,
        ),
        host_link=generation.host_link,
        peer_link=generation.host_link,
        usable_gib=total_mib / 1024,
        source="this machine's driver",
        note="peaks follow from clocks and units; `tightfit calibrate` measures what is reached",
    )
