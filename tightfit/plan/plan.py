"""Plan: a workload on a machine with the chosen layout and levers, and their predicted memory and time.

Saved as one JSON file that needs nothing else: the model's shape is in it. `Plan.load` reads it back, and `job_fields`
are the fields of a job file that runs exactly this plan (data and output are the user's to add where the plan was made
from a model's name alone).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from tightfit.bounded_files import LARGEST_RECORD_BYTES, read_json
from tightfit.durable import write_text
from tightfit.errors import UserError
from tightfit.hardware.machine import Machine, machine_of_json
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.overheads import DEFAULT
from tightfit.memory.ledger import Ledger
from tightfit.plan.mfu import peak_flop_s, token_flops
from tightfit.plan.steptime import StepTime

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One answer of the planner; bytes of the host are one node's."""

    model: str
    workload: Workload
    machine: Machine
    layout: Layout
    levers: Levers
    ledger: Ledger
    time: StepTime
    gpu_peak_bytes: int
    host_peak_bytes: int
    """Of a node's host while a checkpoint is written."""
    saving_bytes: int = 0
    """The part of `host_peak_bytes` that is copied to write the checkpoint."""
    steps: int | None = None
    job: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether the card and, where its size is known, the host hold it."""
        return self.missing_gpu_bytes <= 0 and self.missing_host_bytes <= 0

    @property
    def missing_gpu_bytes(self) -> int:
        """Bytes that a card lacks; negative where there is room."""
        return self.gpu_peak_bytes - self.machine.accelerator.memory_bytes

    @property
    def missing_host_bytes(self) -> int:
        """Bytes that a node's host lacks; 0 where its size is not known, negative where there is room."""
        return 0 if self.machine.host_bytes is None else self.host_peak_bytes - self.machine.host_bytes

    @property
    def training_host_bytes(self) -> int:
        """Host bytes of a node between checkpoints."""
        return self.host_peak_bytes - self.saving_bytes

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of one optimizer step."""
        return self.time.step_s

    @property
    def tokens_per_second(self) -> float:
        """Predicted, over all GPUs."""
        return self.workload.tokens / self.time.step_s

    @property
    def mfu(self) -> float:
        """Predicted share of the machine's peak that goes into the model's own operations."""
        frozen = self.workload.adapted is not None
        flops = token_flops(self.workload.spec, self.workload.sequence_length, frozen=frozen)
        return flops * self.tokens_per_second / peak_flop_s(self.workload.precision, self.machine)

    def confirmed(self, simulated: Ledger) -> dict[str, Any]:
        """A simulation's result as plain data: it replays the allocator but has no CUDA context, which is added."""
        has_context = any(line.component == "cuda context" for line in simulated.lines)
        peak_bytes = simulated.peak_bytes() + (0 if has_context else DEFAULT.context_bytes)
        fits = peak_bytes <= self.machine.accelerator.memory_bytes
        return {"fits": fits, "gpu_peak_bytes": peak_bytes, "ledger": simulated.to_json()}

    def job_fields(self) -> dict[str, Any]:
        """The fields of a job file that runs this plan."""
        steps = {"steps": self.steps} if self.steps else {}
        decided: dict[str, Any] = {
            "model": self.job.get("model", {"source": self.model}),
            "global_batch": self.workload.global_batch,
            "precision": self.workload.precision,
            "layout": self.layout.model_dump(),
            "levers": self.levers.model_dump(),
        }
        data = {**self.job.get("data", {}), "sequence_length": self.workload.sequence_length}
        return {**self.job, **steps, **decided, "data": data}

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "format": FORMAT,
            "model": self.model,
            "fits": self.fits,
            "gpu_peak_bytes": self.gpu_peak_bytes,
            "host_peak_bytes": self.host_peak_bytes,
            "saving_bytes": self.saving_bytes,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "steps": self.steps,
            "workload": asdict(self.workload),
            "machine": self.machine.to_json(),
            "layout": self.layout.model_dump(),
            "levers": self.levers.model_dump(),
            "time": self.time.to_json(),
            "ledger": self.ledger.to_json(),
            "job": dict(self.job),
        }

    def save(self, path: Path) -> None:
        """Write the plan to `path`, whole or not at all."""
        refuse_overwriting(path)
        write_text(path, json.dumps(self.to_json(), indent=1), what="plan ", remedy="choose another place")

    @classmethod
    def load(cls, path: Path) -> "Plan":
        """The plan that `save` wrote; a UserError for any other file."""
        remedy = "make a plan with `tightfit plan --save`"
        return cls.from_json(read_json(path, LARGEST_RECORD_BYTES, "a plan", remedy=remedy), str(path))

    @classmethod
    def from_json(cls, data: Any, where: str) -> "Plan":
        """The plan from `to_json`'s data; an error names `where` the data came from."""
        try:
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r} instead of {FORMAT}")
            return cls(
                model=str(data["model"]),
                workload=_from_json(Workload, data["workload"]),
                machine=machine_of_json(data["machine"]),
                layout=Layout.model_validate(data["layout"]),
                levers=Levers.model_validate(data["levers"]),
                ledger=Ledger.from_json(data["ledger"], where),
                time=StepTime(**{name: float(value) for name, value in data["time"].items()}),
                gpu_peak_bytes=int(data["gpu_peak_bytes"]),
                host_peak_bytes=int(data["host_peak_bytes"]),
                saving_bytes=int(data.get("saving_bytes", 0)),
                steps=data["steps"],
                job=dict(data["job"]),
            )
        except UserError as error:
            raise UserError(f"{where} is not a plan that can be used: {error}") from None
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
            reason = str(error).split("\n", 1)[0]
            raise UserError(f"{where} is not a plan ({reason}); make one with `tightfit plan --save`") from None


def refuse_overwriting(path: Path) -> None:
    """Raise a UserError if `path` exists and is not a plan, or its directory does not exist."""
    if not path.parent.is_dir():
        raise UserError(
            f"cannot write plan {path}: there is no directory {path.parent}; make it, or choose another place"
        )
    if path.exists() and not _is_plan(path):
        raise UserError(f"{path} is there already and is not a plan; give --save another name, or remove it")


def _is_plan(path: Path) -> bool:
    """Whether the file can be read as a plan; a pipe or a device is not read, as it may never answer."""
    try:
        return path.is_file() and bool(Plan.load(path))
    except (UserError, UnicodeDecodeError):
        return False


def _from_json(annotation: Any, value: Any) -> Any:
    """A frozen dataclass, with those inside it, from `asdict` of one that went through JSON."""
    if isinstance(value, list):
        return tuple(_from_json(None, each) for each in value)
    kind: Any = next((each for each in (annotation, *get_args(annotation)) if is_dataclass(each)), None)
    if kind is None or (value is None and kind is not annotation):  # of `Rope | None`
        return value
    annotations = get_type_hints(kind)
    return kind(**{name: _from_json(annotations.get(name), each) for name, each in value.items()})
