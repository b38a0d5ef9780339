"""Shortage: what a run was doing when the GPU had no more memory, what held it, and what would have made room.

It is collected where the error is caught, before anything is freed: the error's message says how many bytes were
requested and free, its traceback which module and operation requested them, and existing gradients how far backward had
come. Tensors of the model and the optimizer are counted; other allocated bytes are activations and kernels' workspaces.
The advice is the planner's: of all levers whose predicted peak is lower by at least the missing bytes, the fastest.
"""

import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.errors import UserError
from tightfit.hardware.machine import Machine, parse_machine
from tightfit.jobs.job import Job
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.overheads import DEFAULT, INSTALLED
from tightfit.memory.formulas.training import peaks
from tightfit.memory.ledger import Component, Ledger, Line, Phase
from tightfit.plan.cost import Costs
from tightfit.plan.host_room import usable_host_bytes
from tightfit.plan.search.search import cheapest_that_fits
from tightfit.plan.search.space import SearchSpace
from tightfit.train.optimizer.adamw import MasterAdamW

EXIT_CODE = 3
"""Exit status of `tightfit train` when the GPU ran out of memory."""
SIZES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
HERE = Path(__file__).parent.parent
FALLBACK = "H200"
"""The card whose rates order the levers by time where there is no GPU."""


@dataclass(frozen=True)
class Advice:
    """Levers that would have made room, also as command-line overrides; `gpu_bytes` is their predicted peak, `slower`
    the predicted increase of a step's time as a share."""

    overrides: tuple[str, ...]
    levers: Levers
    gpu_bytes: int
    slower: float


@dataclass(frozen=True)
class Shortage:
    """One out-of-memory error; `held` is a ledger of that moment."""

    step: int
    phase: Phase
    module: str
    operation: str
    wanted_bytes: int
    missing_bytes: int
    held: Ledger
    advice: Advice | None
    micro_batch: int
    safe: str

    @property
    def sentence(self) -> str:
        """What was short, and what to do about it, in one sentence."""
        way = f"set {' '.join(self.advice.overrides)}" if self.advice else "lower layout.micro_batch"
        return (
            f"step {self.step}: the GPU ran out of memory in {self.phase}, {self.missing_bytes / 2**30:.2f} GiB short "
            f"of {self.wanted_bytes / 2**30:.2f} GiB for {self.module or self.operation}; {way}; {self.safe}"
        )


class RunOutOfMemoryError(UserError):
    """A run that ended for lack of GPU memory; `shortage` says how."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(shortage.sentence)
        self.shortage = shortage


@dataclass(frozen=True)
class Running:
    """What was running: its job, shape and parts."""

    job: Job
    workload: Workload
    model: nn.Module
    optimizer: MasterAdamW
    device: torch.device


def shortage_of(error: torch.OutOfMemoryError, running: Running, step: int, phase: Phase, safe: str) -> Shortage:
    """The shortage behind `error`; call this where the error is caught."""
    wanted, missing, limit = sizes_of(str(error))
    module, operation = _place(error, running.model)
    if phase == "backward" and not module and running.optimizer.in_backward is None:
        module = _layer_at_work(running.model)
    return Shortage(
        step=step,
        phase=phase,
        module=module,
        operation=operation,
        wanted_bytes=wanted,
        missing_bytes=missing,
        held=held_now(running, phase),
        advice=_advice(running, missing, limit),
        micro_batch=running.job.layout.micro_batch,
        safe=safe,
    )


def sizes_of(message: str) -> tuple[int, int, int]:
    """Bytes requested, bytes missing, and the most this process could have, parsed from torch's message; 0: unknown.

    Memory that is reserved but not allocated is in blocks too small for the request, so it is not counted as free.
    """
    wanted = _size(r"Tried to allocate ([\d.]+) (\w+)", message)
    free = _size(r"of which ([\d.]+) (\w+) is free", message)
    allowed = _size(r"([\d.]+) (\w+) allowed", message)
    used = _size(r"this process has ([\d.]+) (\w+) memory in use", message)
    limit = used + free
    if allowed:
        limit = allowed + DEFAULT.context_bytes
        taken = _size(r"memory ([\d.]+) (\w+) is allocated", message) + _size(
            r"and ([\d.]+) (\w+) is reserved", message
        )
        free = min(free, max(0, allowed - (taken or used)))
    return wanted, max(wanted - free, 0) or wanted, limit


def _size(pattern: str, message: str) -> int:
    match = re.search(pattern, message)
    return int(float(match[1]) * SIZES.get(match[2], 0)) if match else 0


def _place(error: BaseException, model: nn.Module) -> tuple[str, str]:
    """The innermost module of `model` and the innermost function of this package on the error's stack."""
    names = {id(module): name for name, module in model.named_modules()}
    module = operation = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            module = names[id(owner)]
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(HERE):
            operation = f"{path.relative_to(HERE)}:{line} {frame.f_code.co_name}"
    return module, operation


def _layer_at_work(model: nn.Module) -> str:
    """The layer that backward was in: no module is on its stack, so it is the last layer without all its gradients."""
    layers = list(getattr(model, "layers", []))
    trained = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
    lacking = [i for i, parameters in enumerate(trained) if any(p.grad is None for p in parameters)]
    if not lacking:
        return "embed" if layers else ""
    return f"layers.{lacking[-1]}" if lacking[-1] < len(layers) - 1 else f"layers.{lacking[-1]} or the loss"


def held_now(running: Running, phase: Phase) -> Ledger:
    """Bytes on the device at this moment, by component."""
    known: dict[Component, list[Tensor]] = {
        "weights": [p.data for p in running.model.parameters()],
        "gradients": [p.grad for p in running.model.parameters() if p.grad is not None],
        "master weights": [],
        "optimizer states": [],
    }
    for bucket in running.optimizer.buckets:
        if running.optimizer.casts_gradients:
            known["master weights"] += bucket.masters
        for index in range(len(bucket.masters)):
            known["optimizer states"] += bucket.updater.states(index).values()
    seen: set[int] = set()
    lines = [
        Line(component=component, phase=phase, bytes=size)
        for component, tensors in known.items()
        if (size := sum(_own_bytes(tensor, running.device, seen) for tensor in tensors))
    ]
    if running.device.type == "cuda":
        lines += _rest(sum(line.bytes for line in lines), phase)
    return Ledger("measurement", tuple(lines))


def _own_bytes(tensor: Tensor, device: torch.device, seen: set[int]) -> int:
    """Bytes of the tensor's storage; 0 if it is on another device or in `seen`, to which it is added."""
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    storage = local.untyped_storage()
    if local.device.type != device.type or storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return int(storage.nbytes())


def _rest(known_bytes: int, phase: Phase) -> list[Line]:
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return [
        Line(
            component="activations",
            phase=phase,
            bytes=max(0, allocated - known_bytes),
            detail="and kernels' workspaces",
        ),
        Line(component="allocator slack", phase=phase, bytes=max(0, reserved - allocated)),
    ]


def _advice(running: Running, missing_bytes: int, limit_bytes: int = 0) -> Advice | None:
    """The fastest levers whose predicted peak is lower by the missing bytes and below the process's limit: later
    phases of the step, which were not reached, may need more than the one that failed."""
    job, workload = running.job, running.workload
    space = SearchSpace(workload, _machine(running))
    now = peaks(workload, job.layout, job.levers, INSTALLED).gpu_bytes
    found = cheapest_that_fits(space, job.layout, job.levers, min(now - missing_bytes, limit_bytes or now))
    if found is None:
        return None
    changed = [name for name, value in found.levers if value != getattr(job.levers, name)]
    slower = found.step_s / Costs(workload, space.machine).step(job.layout, job.levers).step_s - 1
    overrides = tuple(f"-o levers.{name}={_written(getattr(found.levers, name))}" for name in changed)
    return Advice(overrides, found.levers, found.gpu_bytes, slower)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _machine(running: Running) -> Machine:
    from tightfit.train.fitting import this_machine

    if running.device.type == "cuda":
        try:
            return this_machine(running.job.layout.ranks)
        except UserError:  # a card that is not in the catalog
            pass
    return parse_machine(f"{running.job.layout.ranks}x{FALLBACK}", usable_host_bytes())
