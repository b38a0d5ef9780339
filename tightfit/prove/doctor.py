"""`tightfit doctor`: a verdict on a machine with several GPUs, in under five minutes.

All ranks of the machine run one examination, in the order in which a fault would hide the next one:

    1. collectives give the right results
    2. how long they take, over sizes, and each pair of ranks alone
    3. every split that fits the number of ranks trains as one process does (equivalence.py)
    4. the rates of one device, where no calibration has them

Findings are written to a file at once, and each rank writes down what it is about to do. So if a rank dies or hangs,
the diagnosis names the rank and what it was doing, beside all findings before. Speeds are judged on GPUs only:
processes on one CPU share it. Splits for which no time is left are listed as not checked.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tightfit.errors import UserError
from tightfit.hardware.calibration import CPU, Calibration, read_calibrations, write_calibration
from tightfit.hardware.collective_rates import CollectiveRates
from tightfit.launch.together import run_together
from tightfit.parallel.mesh import grid_of, make_mesh
from tightfit.prove.calibrate import calibrate
from tightfit.prove.collectives import measure_collectives, pair_gb_s, wrong_collectives
from tightfit.prove.equivalence import compare
from tightfit.prove.machine_facts import Finding, machine_findings, slow_links
from tightfit.prove.splits import Split, splits_that_fit

LIMIT_S = 290.0
"""The limit of the whole examination."""
RESERVED_S = 60.0
"""Part of the limit, kept for measuring one device after the splits."""
NOTES = "findings"


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The examination that all ranks run; picklable."""

    folder: str
    splits: Sequence[Split]
    until_s: float
    """When splits must end, on the clock of `time.monotonic`, which all processes of a machine share."""
    needs_calibration: bool


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings, the measured rates, and the file they were written to."""

    device: str
    ranks: int
    seconds: float
    findings: tuple[Finding, ...]
    rates: CollectiveRates | None = None
    calibration_file: str | None = None

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not any(finding.verdict == "wrong" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"healthy": self.healthy, **asdict(self)}


@dataclass
class Notebook:
    """Files, which outlive a rank, with what it is doing and, on the first rank, with the findings."""

    folder: Path
    rank: int = field(default_factory=lambda: dist.get_rank())

    def begin(self, what: str) -> None:
        """Write down what the rank is about to do; called before anything that may hang or crash."""
        (self.folder / f"rank-{self.rank}").write_text(what, encoding="utf-8")

    def found(self, what: str, verdict: Literal["fine", "note", "wrong"], words: str) -> None:
        """Write down a finding, which all ranks have made; only the first one writes."""
        if self.rank == 0:
            with (self.folder / NOTES).open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(Finding(what, verdict, words))) + "\n")


Examine = Callable[[torch.device, Examination], Any]


def run_doctor(
    ranks: int | None = None,
    *,
    splits: Sequence[Split] | None = None,
    limit_s: float = LIMIT_S,
    examine: Examine | None = None,
) -> Diagnosis:
    """Examine this machine with a rank per GPU (or `ranks` processes); writes a calibration where all is well."""
    began = time.monotonic()
    device, world = _device_and_ranks(ranks)
    needs_calibration = device not in read_calibrations()
    findings = machine_findings(world if device != CPU else 0)
    measured: tuple[CollectiveRates, Calibration | None] | None = None
    with tempfile.TemporaryDirectory(prefix="tightfit-doctor-") as folder:
        plan = Examination(
            folder=folder,
            splits=splits_that_fit(world) if splits is None else splits,
            until_s=began + limit_s - (RESERVED_S if needs_calibration else 0),
            needs_calibration=needs_calibration,
        )
        try:
            measured = run_together(world, examine or examination, plan, limit_s=limit_s)
        except (UserError, RuntimeError) as error:
            findings.append(Finding("ranks", "wrong", _what_happened(str(error), Path(folder), world)))
        findings += _read_notes(Path(folder))
    diagnosis = Diagnosis(device=device, ranks=world, seconds=time.monotonic() - began, findings=tuple(findings))
    if measured is None:
        return diagnosis
    rates, calibration = measured
    path = _keep(device, rates, calibration) if diagnosis.healthy else None
    return replace(diagnosis, rates=rates, calibration_file=path)


def _device_and_ranks(ranks: int | None) -> tuple[str, int]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    world = ranks or gpus
    if world < 2:
        found = f"{gpus} GPU{'s' if gpus != 1 else ''}"
        raise UserError(f"this machine has {found}, and doctor compares several; give --ranks to use CPU processes")
    return (torch.cuda.get_device_name(0) if gpus >= world else CPU), world


def examination(device: torch.device, plan: Examination) -> tuple[CollectiveRates, Calibration | None]:
    """The examination on one rank of a running group: findings go to the notebook, rates are returned."""
    notes = Notebook(Path(plan.folder))
    notes.begin("its first collectives")
    if wrong := wrong_collectives(device):
        raise UserError("; ".join(wrong[:3]))
    notes.found("collectives", "fine", f"right on {dist.get_world_size()} ranks over {dist.get_backend()}")
    notes.begin("measuring collectives")
    rates = measure_collectives(device)
    notes.begin("measuring pairs of ranks")
    pairs = pair_gb_s(device)
    middle = statistics.median(pairs.values())
    slow = slow_links(rates, pairs) if device.type == "cuda" else []
    for words in slow:
        notes.found("links", "wrong", words)
    if not slow:
        notes.found(
            "links", "fine", f"pairs exchange {middle:,.1f} GB/s each way, the slowest {min(pairs.values()):,.1f}"
        )
    _check_splits(device, plan, notes)
    notes.begin("measuring one device")
    calibration = calibrate(device, lambda line: None) if plan.needs_calibration and notes.rank == 0 else None
    dist.barrier()
    return rates, calibration


def _check_splits(device: torch.device, plan: Examination, notes: Notebook) -> None:
    """Check every split until the time is up; the first rank's clock decides for all."""
    meshes: dict[str, DeviceMesh] = {}
    for number, split in enumerate(plan.splits):
        goes_on = [time.monotonic() < plan.until_s]
        dist.broadcast_object_list(goes_on, device=device if device.type == "cuda" else None)
        if not goes_on[0]:
            left = [each.name for each in plan.splits[number:]]
            return notes.found("splits", "note", f"no time was left to check {len(left)}: {', '.join(left)}")
        notes.begin(f"checking {split.name}")
        verdict = compare(split.target, _mesh(split, meshes, device.type), device, steps=1)
        if verdict.first is None:
            notes.found(split.name, "fine", f"as one process to {verdict.largest.error:.0e}")
        else:
            notes.found(split.name, "wrong", f"trains otherwise than one process: {verdict.first.sentence()}")


def _mesh(split: Split, known: dict[str, DeviceMesh], kind: str) -> DeviceMesh:
    """The split's mesh, shared by layouts with the same groups, as every NCCL group takes memory and a second."""
    grid = json.dumps(grid_of(split.layout))
    if grid not in known:
        known[grid] = make_mesh(split.layout, kind)
    return known[grid]


def _what_happened(error: str, folder: Path, world: int) -> str:
    """The failure, and what every rank was doing."""
    last = error.strip().splitlines()[-1] if "Traceback" in error else error
    ranks_doing: dict[str, list[int]] = {}
    for rank in range(world):
        file = folder / f"rank-{rank}"
        ranks_doing.setdefault(file.read_text(encoding="utf-8") if file.is_file() else "starting", []).append(rank)
    doing = "; ".join(f"rank {', '.join(map(str, ranks))} in {what}" for what, ranks in ranks_doing.items())
    return f"{last} ({doing})"


def _read_notes(folder: Path) -> list[Finding]:
    file = folder / NOTES
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [Finding(**json.loads(line)) for line in lines]


def _keep(device: str, rates: CollectiveRates, calibration: Calibration | None) -> str:
    """Write the collectives' rates into the device's calibration, measured now or before; returns the file."""
    entry = calibration or read_calibrations()[device]
    return os.fspath(write_calibration(replace(entry, collectives=rates)))
