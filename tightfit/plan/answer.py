"""From a question to an answer: the recommended plan and its alternatives, or what would have to change.

Defaults for what the user leaves open, which the answer states: rows of 4096 tokens (or the model's length); as many
rows a step as the machine processes in half a minute at 40 % of its peak, a power of two per GPU, at least one, and at
most 4 million tokens in all; bf16 where the card has it, else fp16.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from tightfit.errors import UserError
from tightfit.hardware.machine import Machine
from tightfit.jobs.adapter import AdapterTraining
from tightfit.jobs.engine import EngineName
from tightfit.jobs.precision import PrecisionName
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.training import training_ledger
from tightfit.models.spec import ModelSpec
from tightfit.plan.batch import batch_of, rows_of_tokens
from tightfit.plan.mfu import peak_flop_s, token_flops
from tightfit.plan.notes import notes_on
from tightfit.plan.plan import Plan
from tightfit.plan.search.candidate import Candidate
from tightfit.plan.search.changes import Change, changes
from tightfit.plan.search.fill import fill_card
from tightfit.plan.search.pins import Pins
from tightfit.plan.search.search import REPORTED_KINDS, search
from tightfit.plan.search.space import SearchSpace

DEFAULT_LENGTH = 4096
MOST_DEFAULT_TOKENS = 2**22
DEFAULT_STEP_S = 30.0
DEFAULT_MFU = 0.4
HOST_TOLD_BYTES = 2**30
"""Host memory from which on adapters are worth a note, as they need none."""
ADVISED_ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "--adapter 16 (LoRA)": {"rank": 16},
    "--adapter 16 --bits 4 (QLoRA)": {"rank": 16, "bits": 4},
}
"""Options of `tightfit plan` and the fields of a job that they stand for; the first that fits is advised."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to plan. `job` holds the fields of a job file, where the plan is made from one."""

    model: str
    workload: Workload
    machine: Machine
    pins: Pins = field(default_factory=Pins)
    lossy: bool = False
    positions: int | None = None
    """Positions of the model as published; the workload may have longer rows."""
    steps: int | None = None
    job: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def space(self) -> SearchSpace:
        """The layouts and levers to search."""
        pins = self.pins.with_engine(self.workload.engine)
        return SearchSpace(self.workload, self.machine, pins, self.lossy)

    def with_adapters(self, fields: Mapping[str, Any]) -> "Question":
        """This question with adapters on the model; `fields` are those of a job's section `adapter`."""
        workload = self.workload
        if (engine := workload.engine_name) != "tightfit":
            raise UserError(f"--adapter is planned for tightfit's own engine, but --engine is {engine}; leave one out")
        try:
            settings = AdapterTraining.model_validate(dict(fields))
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(map(str, problem["loc"])) or "adapter"
            wrong = problem["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
            raise UserError(f"adapter.{name} is {problem['input']!r:.40}, but {wrong}") from None
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
            ledger=training_ledger(self.workload, candidate.layout, candidate.levers, self.space.overheads),
            time=candidate.time,
            gpu_peak_bytes=candidate.gpu_bytes,
            host_peak_bytes=candidate.host_peak_bytes,
            saving_bytes=candidate.saving_bytes,
            steps=self.steps,
            job=self.job,
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`plan` fits, or else is the one nearest to fitting; in the latter case `changes` say what would fit."""

    plan: Plan
    alternatives: tuple[Candidate, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    layouts: int

    def to_json(self) -> dict[str, Any]:
        """The plan's JSON with the answer's other fields; the ledger as a list of its lines."""
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
    """Search for plans, fill the card, and collect alternatives, changes and notes."""
    found = search(question.space)
    best = found.best or found.nearest
    plan = question.plan(fill_card(question.space, best) if found.best else best)
    others = tuple(each for each in found.plans if each is not best)[: REPORTED_KINDS - 1]
    needed = () if plan.fits else tuple(changes(question.space))
    notes = (*_on_adapters(question, plan), *notes_on(plan, question.positions))
    return Answer(plan=plan, alternatives=others, changes=needed, notes=notes, layouts=found.layouts)


def _on_adapters(question: Question, plan: Plan) -> Iterator[str]:
    """Adapters with which the frozen model fits, where training all of it does not fit or moves states to the host."""
    is_on_the_card = plan.fits and plan.training_host_bytes <= HOST_TOLD_BYTES
    if is_on_the_card or question.workload.adapted is not None:
        return
    for options, fields in ADVISED_ADAPTERS.items():
        try:
            adapted = question.with_adapters(fields)
            best = search(adapted.space).best
        except UserError:  # another engine, or a model whose experts have no adapters
            return
        if best is not None:
            small = adapted.plan(fill_card(adapted.space, best))
            yield (
                f"to fine-tune, adapters on the frozen model fit: {options}, {small.gpu_peak_bytes / 2**30:.2f} GiB a "
                f"GPU, {small.step_seconds:.3g} s a step"
            )
            return


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
    workload = Workload(
        spec=replace(spec, max_positions=max(length, spec.max_positions)),
        sequence_length=length,
        global_batch=1 if rows is None else rows,
        precision=precision or default_precision(machine),
        engine_name=engine,
    )
    return replace(workload, global_batch=default_rows(workload, machine)) if rows is None else workload


def default_precision(machine: Machine) -> PrecisionName:
    """bf16 where the card has it, else fp16; float32 on a CPU, and on a card with neither."""
    rates = machine.accelerator.rates
    if machine.is_cpu or not (rates.bf16 or rates.fp16):
        return "fp32"
    return "bf16" if rates.bf16 else "fp16"


def default_rows(workload: Workload, machine: Machine) -> int:
    """Rows of a step by default."""
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
