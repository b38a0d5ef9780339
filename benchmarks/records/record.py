"""A record: one way to train a shape, predicted, then built, timed and weighed on this machine.

Predicted by the formulas and the planner's costs just before the run, with what is free then. Times are medians of
steps after the first ones. One of ours ends when its loss is known: what of its update is still on its way to the host
then runs beside the next step, and is counted there; peers are waited for. `build_s` is what it took until the first
step could begin, pinning included. Memory is the allocator's peak of all steps, and the host's pinned pages (of peers,
what the machine's free memory fell by). A steady step asks CUDA for nothing: `device_mallocs` and `device_frees` count
what the timed steps asked for. Out of memory is a result too. Weights are random, and so are tokens.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from benchmarks.peers.training_step import Step, make_deepspeed, make_huggingface
from benchmarks.truth.prediction import filled
from tightfit.errors import UserError
from tightfit.hardware.host import free_host_bytes
from tightfit.hardware.machine import Machine, parse_machine
from tightfit.jobs.job import PrecisionName
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.training import training_ledger
from tightfit.memory.host import pinned_bytes
from tightfit.models.decoder import Implementations
from tightfit.models.resolve import resolve_spec
from tightfit.plan.answer import Question, answer
from tightfit.plan.cost import Costs
from tightfit.plan.host_room import usable_host_bytes
from tightfit.plan.search.pins import Pins, parse_pins
from tightfit.prove.rehearsal import build
from tightfit.train.fitting import this_machine, with_memory
from tightfit.train.step import ignore

GIB = 2**30
Made = TypeVar("Made")
FIT = "fit"
"""Instead of levers: what the planner picks."""
OURS = "tightfit"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train a shape: whose, in which precision, with which levers."""

    who: str = OURS
    levers: str = ""
    precision: PrecisionName = "bf16"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A shape, and the ways to train it; `cap_gb` makes the card smaller."""

    model: str
    length: int
    ways: tuple[Way, ...]
    rows: int = 1
    steps: int = 3
    warm_up: int = 2
    layers: int | None = None
    cap_gb: float | None = None

    def workload(self, way: Way) -> Workload:
        """One step of it."""
        spec = resolve_spec(self.model)
        spec = replace(spec, max_positions=max(spec.max_positions, self.length), layers=self.layers or spec.layers)
        return Workload(spec=spec, sequence_length=self.length, global_batch=self.rows, precision=way.precision)

    @property
    def layout(self) -> Layout:
        """One rank, all rows at once."""
        return Layout(micro_batch=self.rows)

    def machine(self) -> Machine:
        """This one, with a card of `cap_gb`; where there is no GPU, an H200 beside this host."""
        cap = None if self.cap_gb is None else int(self.cap_gb * 1e9)
        if torch.cuda.is_available():
            return this_machine(1, cap)
        return with_memory(parse_machine("H200", usable_host_bytes()), cap or 139 * GIB)


@dataclass(frozen=True)
class Prediction:
    """Bytes and seconds that are said beforehand; nothing of peers."""

    gpu_bytes: int | None = None
    host_bytes: int | None = None
    step_s: float | None = None


@dataclass
class Found:
    """What one way took; nothing but its levers where memory ran out."""

    levers: Levers
    predicted: Prediction
    result: str = "ok"
    build_s: float = 0.0
    first_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    loss: float = 0.0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    host_bytes: int = 0
    mallocs: int = 0
    frees: int = 0


def levers_of(case: Case, way: Way, machine: Machine) -> Levers:
    """Given, or what the planner picks for this card."""
    if way.levers != FIT:
        return Levers(**parse_pins([f"levers.{each}" for each in way.levers.split()]).levers)
    pins = Pins({"micro_batch": case.rows})
    return answer(Question(model=case.model, workload=case.workload(way), machine=machine, pins=pins)).plan.levers


def predict(case: Case, way: Way, levers: Levers, machine: Machine) -> Prediction:
    """What formulas and costs say of our own ways."""
    if way.who != OURS:
        return Prediction()
    workload = case.workload(way)
    ledger = training_ledger(workload, case.layout, levers)
    step_s = Costs(workload, machine).step(case.layout, levers).step_s
    return Prediction(ledger.peak_allocated_bytes(), ledger.allocated_bytes("backward", place="host"), step_s)


def make_step(case: Case, way: Way, levers: Levers, device: torch.device) -> Step:
    """A step, built and ready."""
    workload = case.workload(way)
    if way.who == "deepspeed":
        return make_deepspeed(workload, device)
    if way.who != OURS:
        return make_huggingface(
            case.model, workload, device, checkpointed=bool(levers.checkpoint_every), liger=way.who.endswith("liger")
        )
    program = build(workload, case.layout, levers, device, Implementations(), fill=filled)
    return lambda: program.step(ignore).loss


def run(case: Case, way: Way, device: torch.device, free_before_bytes: int | None) -> Found:
    """Predict it, build it, warm it up, time it."""
    _clear(device)
    machine = case.machine()
    levers = levers_of(case, way, machine)
    found, pinned = Found(levers, predict(case, way, levers, machine)), pinned_bytes()
    try:
        found.build_s, step = _clocked(lambda: make_step(case, way, levers, device), device)
        _time(case, found, step, device, waits=way.who != OURS)
        found.host_bytes = pinned_bytes() - pinned
        if way.who == "deepspeed":
            found.host_bytes = max(0, (free_before_bytes or 0) - (free_host_bytes() or 0))
    except torch.OutOfMemoryError:
        found.result = "out of memory"
    except UserError as error:
        found.result = str(error)
    finally:
        step = None  # type: ignore[assignment]
        _clear(device)
    return found


def _time(case: Case, found: Found, step: Step, device: torch.device, *, waits: bool) -> None:
    """Steps to warm up, then those that count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for count in range(case.warm_up):
        seconds, found.loss = _clocked(step, device, waits=waits)
        found.first_s = found.first_s if count else seconds
    before = _device_calls(device)
    for _ in range(case.steps):
        seconds, found.loss = _clocked(step, device, waits=waits)
        found.seconds.append(seconds)
    found.mallocs, found.frees = (after - b for after, b in zip(_device_calls(device), before, strict=True))
    if device.type == "cuda":
        found.allocated_bytes, found.reserved_bytes = (
            torch.cuda.max_memory_allocated(),
            torch.cuda.max_memory_reserved(),
        )


def _device_calls(device: torch.device) -> tuple[int, int]:
    """How often the allocator has asked CUDA for memory, and given some back."""
    stats = torch.cuda.memory_stats() if device.type == "cuda" else {}
    return int(stats.get("num_device_alloc", 0)), int(stats.get("num_device_free", 0))


def _clocked(do: Callable[[], Made], device: torch.device, *, waits: bool = True) -> tuple[float, Made]:
    """Seconds, and what came of it."""
    began = time.perf_counter()
    made = do()
    if waits and device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, made


def _clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def row_of(name: str, case: Case, way: Way, found: Found) -> dict[str, Any]:
    """A row of the results."""
    seconds = statistics.median(found.seconds) if found.result == "ok" else None
    pulled, said = found.levers.model_dump(exclude_defaults=True), found.predicted
    return {
        "case": name,
        "implementation": way.who,
        "model": case.model,
        "layers": case.workload(way).spec.layers,
        "sequence_length": case.length,
        "rows": case.rows,
        "precision": way.precision,
        "levers": " ".join(f"{key}={value}" for key, value in pulled.items()),
        "fitted": int(way.levers == FIT),
        "cap_gb": case.cap_gb or "",
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "predicted_gib": _gib(said.gpu_bytes),
        "predicted_host_gib": _gib(said.host_bytes),
        "predicted_s": _shown(said.step_s),
        "build_s": f"{found.build_s:.2f}",
        "first_step_s": f"{found.first_s:.4f}",
        "steps": len(found.seconds),
        "step_s": _shown(seconds),
        "tokens_per_second": "" if seconds is None else f"{case.rows * case.length / seconds:.0f}",
        "peak_allocated_gib": _gib(found.allocated_bytes),
        "peak_reserved_gib": _gib(found.reserved_bytes),
        "host_gib": _gib(found.host_bytes),
        "device_mallocs": found.mallocs,
        "device_frees": found.frees,
        "loss": f"{found.loss:.4f}",
        "result": found.result,
    }


def _gib(count: int | None) -> str:
    return "" if count is None else f"{count / GIB:.3f}"


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.4f}"
