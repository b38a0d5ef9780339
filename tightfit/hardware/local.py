"""The GPUs, CPU and memory of this machine, from nvidia-smi, the driver and the kernel; never by importing torch."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

from tightfit.errors import UserError
from tightfit.hardware.accelerator import Accelerator, PeakRates
from tightfit.hardware.calibration import CPU, Calibration, read_calibrations
from tightfit.hardware.catalog import CATALOG
from tightfit.hardware.driver import DriverFacts, accelerator_of_driver, driver_facts
from tightfit.hardware.links import LINKS
from tightfit.hardware.machine import DEFAULT_NETWORK, Machine, parse_machine

QUERY = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
WAYS = "run tightfit calibrate to plan for its CPU, or name a machine, such as --on 8xH100-80GB"
"""Advice for users without a GPU: the planner has no rates for a CPU until they are measured."""
BRANDS = ("NVIDIA", "TESLA", "GEFORCE")


def local_machine(
    host_memory: str | int | None = None, listing: str | None = None, facts: DriverFacts | None = None
) -> Machine:
    """The GPUs of this machine with the rates that were measured on it, or its CPU where that was calibrated."""
    measured = read_calibrations()
    if listing is None and CPU in measured and not _has_gpu():
        return _cpu_machine(measured[CPU], host_memory)
    machine, name = _gpu_machine(host_memory, listing, facts)
    return replace(machine, calibration=measured.get(name))


def _has_gpu() -> bool:
    try:
        return bool(_listing().strip())
    except UserError:
        return False


def _cpu_machine(calibration: Calibration, host_memory: str | int | None) -> Machine:
    """A machine whose one device is its CPU, with the host's memory as the device's."""
    host = parse_machine("T4", _host_bytes() if host_memory is None else host_memory).host_bytes
    if host is None:
        raise UserError("this machine does not say how much memory it has; give --host-memory")
    rates = PeakRates(fp32=calibration.products_tflop_s["fp32"], bf16=calibration.products_tflop_s.get("bf16"))
    card = Accelerator(
        family="CPU",
        memory_gb=round(host / 1e9),
        form="cpu",
        bandwidth_gb_s=calibration.copy_gb_s,
        rates=rates,
        host_link="unified",
        peer_link="unified",
        usable_gib=host / 2**30,
        source="tightfit calibrate on this machine",
    )
    return Machine(
        nodes=1,
        per_node=1,
        accelerator=card,
        intra=card.peer,
        inter=LINKS[DEFAULT_NETWORK],
        host_bytes=0,  # all of it is the device's
        text=card.name,
        calibration=calibration,
    )


def _gpu_machine(host_memory: str | int | None, listing: str | None, facts: DriverFacts | None) -> tuple[Machine, str]:
    """The GPUs and their name; `listing` and `facts` stand in for what nvidia-smi and the driver say."""
    rows = [row.rsplit(",", 1) for row in (_listing() if listing is None else listing).splitlines() if row.strip()]
    if not rows:
        raise UserError(f"nvidia-smi lists no GPU here; {WAYS}")
    device_name = rows[0][0].strip()
    kinds = {(name.strip(), int(float(mib))) for name, mib in rows}
    cards = {_card(name, mib, facts) for name, mib in kinds}
    if len(cards) > 1:
        names = sorted(card.name for card in cards)
        raise UserError(f"this machine mixes {' and '.join(names)}; name one kind, such as --on 2x{names[0]}")
    card = cards.pop()
    host = _host_bytes() if host_memory is None else host_memory
    if card in CATALOG:
        return parse_machine(f"{len(rows)}x{card.name}:{card.form}", host), device_name
    machine = Machine(
        nodes=1,
        per_node=len(rows),
        accelerator=card,
        intra=card.peer,
        inter=LINKS[DEFAULT_NETWORK],
        host_bytes=parse_machine("T4", host).host_bytes,
        text=f"{len(rows)}x{card.name}",
    )
    return machine, device_name


def _listing() -> str:
    try:
        return subprocess.run(QUERY, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        raise UserError(f"this machine has no GPU that nvidia-smi can list; {WAYS}") from None


def _card(name: str, total_mib: int, facts: DriverFacts | None) -> Accelerator:
    """The catalog's row for a name such as `Tesla V100-SXM2-32GB` and its memory, else a card of the driver's facts."""
    words = [word for word in re.sub(r"[^A-Z0-9]", " ", name.upper()).split() if word not in BRANDS]
    spelled = {"".join(words[:count]) for count in range(1, len(words) + 1)}
    rows = [row for row in CATALOG if row.family.upper() in spelled]
    longest = max((len(row.family) for row in rows), default=0)
    total_bytes = total_mib * 2**20
    rows = [row for row in rows if len(row.family) == longest]
    rows = [row for row in rows if abs(total_bytes - row.memory_gb * 1e9) < 0.12 * row.memory_gb * 1e9]
    if not rows:
        return _unknown_card(name, total_mib, facts or driver_facts())
    forms = [row for row in rows if any(word.startswith(row.form.upper()) for word in words)]
    return (forms or [row for row in rows if row.form == "sxm" and "HBM3" in words] or rows)[0]


def _unknown_card(name: str, total_mib: int, facts: DriverFacts | None) -> Accelerator:
    card = accelerator_of_driver(name, total_mib, facts) if facts else None
    if card is None:
        raise UserError(
            f"this machine's {name} ({total_mib} MiB) is not in the catalog and the driver does not describe it; "
            "write its figures into a file and use --on ./card.yaml (docs/hardware.md)"
        )
    return card


def _host_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    try:
        match = re.search(r"^MemTotal:\s+(\d+) kB", meminfo.read_text(encoding="utf-8"), flags=re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None
