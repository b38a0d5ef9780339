"""From a question to an answer: the plan to take, what else would do, or what would have to change.

Where the user leaves something open, the default is said in the answer: rows of 4096 tokens (or the model's length);
as many rows a step as the machine works through in half a minute at 40 % of its peak, a power of two for each GPU, at
least one and at most 4 million tokens together; and bf16 where the card has it, else fp16.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from tightfit.errors import UserError
from tightfit.hardware.machine import Machine
from tightfit.hardware.sustained import product_share
from tightfit.jobs.adapter import AdapterTraining
from tightfit.jobs.engine import EngineName
from tightfit.jobs.precision import PrecisionName
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.training import training_ledger
from tightfit.models.spec import ModelSpec
from tightfit.plan.batch import batch_of, rows_of_tokens, warning
from tightfit.plan.candidate import Candidate
from tightfit.plan.changes import Change, changes
from tightfit.plan.fill import fill_card
from tightfit.plan.mesh_note import mesh_note
from tightfit.plan.mfu import peak_flop_s, token_flops
from tightfit.plan.one_gpu_note import one_gpu_note
from tightfit.plan.pins import Pins
from tightfit.plan.plan import Plan
from tightfit.plan.search import COMFORT, TOLD, search
from tightfit.plan.space import SearchSpace

DEFAULT_LENGTH = 4096
MOST_DEFAULT_TOKENS = 2**22
DEFAULT_STEP_S = 30.0
DEFAULT_MFU = 0.4
MEASURED_CARD = "H200"
SAVING_TOLD_BYTES = 32 * 2**30
"""A checkpoint that takes more than this of a node's host memory is worth a note."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be planned. `job` holds the fields of a job file, where the plan is made from one."""

    model: str
    workload: Workload
    machine: Machine
    pins: Pins = field(default_factory=Pins)
    lossy: bool = False
    positions: int | None = None
    """Of the model as it is; a workload may have longer rows."""
    steps: int | None = None
    job: Mapping[str, Any] = field(default_factory=dict)

    @property
    def space(self) -> SearchSpace:
        """Where to look for plans."""
        pins = self.pins.with_engine(self.workload.engine)
        return SearchSpace(self.workload, self.machine, pins, self.lossy)

    def with_adapters(self, fields: Mapping[str, int]) -> "Question":
        """The same with adapters on the model; `fields` are those of a job's section."""
        workload = self.workload
        if (engine := workload.engine_name) != "tightfit":
            raise UserError(f"--adapter is planned for tightfit's own engine, but --engine is {engine}; leave one out")
        try:
            settings = AdapterTraining.model_validate(dict(fields))
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(map(str, problem["loc"])) or "adapter"
            raise UserError(f"adapter.{name} is {problem['input']!r:.40}: {problem['msg']}; change it") from None
        adapted = settings.on(self.model, workload.spec)
        return replace(self, workload=replace(workload, adapted=adapted), job={**self.job, "adapter": dict(fields)})

    def plan(self, candidate: Candidate) -> Plan:
        """`candidate` as a plan for this question, with its ledger."""
        return Plan(
            model=self.model,
            workload=self.workload,
            machine=self.machine,
            layout=candidate.layout,
            levers=candidate.levers,
            ledger=training_ledger(self.workload, candidate.layout, candidate.levers),
            time=candidate.time,
            gpu_peak_bytes=candidate.gpu_bytes,
            host_peak_bytes=candidate.host_peak_bytes,
            saving_bytes=candidate.saving_bytes,
            steps=self.steps,
            job=self.job,
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`plan` fits, or is the nearest to fitting; then `changes` say what would fit."""

    plan: Plan
    alternatives: tuple[Candidate, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    layouts: int

    def to_json(self) -> dict[str, Any]:
        """One object; the ledger is its lines."""
        plan = self.plan.to_json()
        return {
            **plan,
            "ledger": plan["ledger"]["lines"],
            "missing_bytes": max(0, self.plan.missing_gpu_bytes),
            "batch": str(batch_of(self.plan.workload, self.plan.layout)),
            "job_seconds": self.plan.steps * self.plan.step_seconds if self.plan.steps else None,
            "alternatives": [_alternative(each, self.plan) for each in self.alternatives],
            "changes": [str(change) for change in self.changes],
            "notes": list(self.notes),
            "layouts_considered": self.layouts,
        }


def _alternative(candidate: Candidate, plan: Plan) -> dict[str, Any]:
    return {
        "layout": candidate.layout.model_dump(),
        "levers": candidate.levers.model_dump(),
        "gpu_peak_bytes": candidate.gpu_bytes,
        "host_peak_bytes": candidate.host_peak_bytes,
        "step_seconds": candidate.step_s,
        "tokens_per_second": plan.workload.tokens / candidate.step_s,
        "slower": candidate.step_s / plan.step_seconds - 1,
    }


def answer(question: Question) -> Answer:
    """Search, and say what there is to say about the result."""
    found = search(question.space)
    best = found.best or found.nearest
    plan = question.plan(fill_card(question.space, best) if found.best else best)
    others = tuple(each for each in found.plans if each is not best)[: TOLD - 1]
    needed = () if plan.fits else tuple(changes(question.space))
    return Answer(
        plan=plan, alternatives=others, changes=needed, notes=tuple(_notes(question, plan)), layouts=found.layouts
    )


def make_workload(
    spec: ModelSpec,
    machine: Machine,
    *,
    sequence_length: int | None = None,
    rows: int | None = None,
    tokens: int | None = None,
    precision: PrecisionName | None = None,
    engine: EngineName = "tightfit",
) -> Workload:
    """The workload a user means, with the defaults above for what was not said."""
    if rows is not None and tokens is not None:
        raise UserError(f"the batch is given as {rows} rows and as {tokens} tokens; give one of the two")
    length = min(DEFAULT_LENGTH, spec.max_positions) if sequence_length is None else sequence_length
    if length < 2:
        raise UserError(f"sequence_length is {length}; give at least 2")
    if tokens is not None:
        rows = rows_of_tokens(tokens, length, machine.ranks)
    if precision is None:
        rates = machine.accelerator.rates
        narrowest: PrecisionName = "bf16" if rates.bf16 else "fp16" if rates.fp16 else "fp32"
        precision = "fp32" if machine.accelerator.form == "cpu" else narrowest
    if length > spec.max_positions:
        spec = replace(spec, max_positions=length)
    workload = Workload(
        spec=spec,
        sequence_length=length,
        global_batch=1 if rows is None else rows,
        precision=precision,
        engine_name=engine,
    )
    return replace(workload, global_batch=default_rows(workload, machine)) if rows is None else workload


def default_rows(workload: Workload, machine: Machine) -> int:
    """Rows of a step where nobody said how many."""
    length = workload.sequence_length
    row_flops = token_flops(workload.spec, length) * length
    seconds = row_flops / (DEFAULT_MFU * peak_flop_s(workload.precision, machine))
    rows = min(DEFAULT_STEP_S / seconds, MOST_DEFAULT_TOKENS / length)
    per_gpu = max(1, int(rows / machine.ranks))
    return machine.ranks * 2 ** (per_gpu.bit_length() - 1)


def steps_of(workload: Workload, steps: int | None, tokens: int | None) -> int | None:
    """Steps of the whole job, given as such or in tokens."""
    if steps is not None and tokens is not None:
        raise UserError(f"the job is given as {steps} steps and as {tokens} tokens; give one of the two")
    found = math.ceil(tokens / workload.tokens) if tokens is not None else steps
    if found is not None and found < 1:
        raise UserError(f"the job has {found} steps; give at least 1")
    return found


def _rates_note(machine: Machine, precision: PrecisionName) -> str | None:
    """Whose rates the times are made of, where they are not the measured card's."""
    card = machine.accelerator
    if machine.calibration is not None:
        return f"times use what `tightfit calibrate` measured on this machine on {machine.calibration.date}"
    if card.family == MEASURED_CARD:
        return None
    share = product_share(card, peak_flop_s(precision, machine) / machine.ranks / 1e12)
    return (
        f"times assume that products reach {share:.0%} of the card's peak (docs/hardware.md); `tightfit calibrate` "
        "measures it where you have one"
    )


def _engine_note(workload: Workload) -> str | None:
    """For whom the numbers are, where that is not us."""
    if workload.engine_name == "tightfit":
        return None
    return f"memory and time are those of {workload.engine.is_for}, not of `tightfit train`"


def _unproven_note(machine: Machine, workload: Workload) -> str | None:
    """What several GPUs have not shown yet, where `tightfit doctor` has not examined them."""
    calibration = machine.calibration
    is_examined = calibration is not None and calibration.collectives is not None
    if machine.ranks == 1 or workload.engine_name != "tightfit" or is_examined:
        return None
    return (
        "splits are proven on CPU processes and on one GPU, never on several: have yours examined by `tightfit doctor` "
        "first"
    )


def _notes(question: Question, plan: Plan) -> list[str]:
    machine, workload = question.machine, question.workload
    room = machine.accelerator.memory_bytes
    said = [
        warning(workload.tokens, machine.ranks),
        _engine_note(workload),
        None
        if question.positions is None or workload.sequence_length <= question.positions
        else f"rows have {workload.sequence_length:,} tokens, but the model has {question.positions:,} positions; "
        "extend them (its rope's scaling, or its position embedding) before training",
        None
        if workload.global_batch % machine.ranks == 0
        else f"a global batch of {workload.global_batch} rows is not a multiple of {machine.ranks} GPUs, so not all of "
        "them can be data ranks",
        f"nodes are connected by {machine.inter.name}; name another link after the machine, such as "
        f"{machine.text.partition(':')[0]}:{'ndr' if machine.inter.name != 'ndr' else 'hdr'}"
        if machine.nodes > 1 and machine.inter.name not in machine.text
        else None,
        f"this uses {used / 2**30:.0f} GiB of host memory a node while it trains; --host-memory says how much there is"
        if (used := plan.training_host_bytes) > 2**30 and machine.host_bytes is None
        else None,
        f"saving copies {plan.saving_bytes / 2**30:.0f} GiB to host memory on a node"
        if plan.saving_bytes > SAVING_TOLD_BYTES
        else None,
        f"tight: {plan.gpu_peak_bytes / room:.0%} of the card, and nothing that leaves more room was found; --confirm "
        "counts more exactly"
        if plan.fits and plan.gpu_peak_bytes > COMFORT * room
        else None,
        "under schedule 2bw gradients are of weights one update old; the pipeline waits where it saves and evaluates"
        if plan.layout.has_two_versions
        else None,
        mesh_note(plan),
        one_gpu_note(plan),
        _rates_note(machine, workload.precision),
        _unproven_note(machine, workload),
    ]
    return [sentence for sentence in said if sentence]
