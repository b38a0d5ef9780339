"""Fitting: the fastest levers with which a job fits this machine, as the planner finds them, and why.

The room is what is free now: the GPU's memory (or a cap that stands for a smaller card) and the host's. The layout is
the job's; so is the micro-batch where the job gives one, and every lever that it gives. Several ranks must choose the
same levers, so their room is the whole card. No lossy lever is chosen.
"""

from dataclasses import dataclass, replace

import torch

from tightfit.errors import UserError
from tightfit.hardware.local import local_machine
from tightfit.hardware.machine import Machine
from tightfit.jobs.job import Job, PrecisionName, rounded_vocabulary
from tightfit.jobs.lever_table import describe_levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.overheads import DEFAULT, INSTALLED
from tightfit.memory.formulas.training import peaks
from tightfit.models.loading import source_spec
from tightfit.models.resolve import reshaped
from tightfit.models.spec import ModelSpec
from tightfit.plan.answer import Answer, Question, answer
from tightfit.plan.cost import Costs
from tightfit.plan.host_room import usable_host_bytes
from tightfit.plan.plan import Plan
from tightfit.plan.search.pins import Pins
from tightfit.train.distillation import teacher_spec
from tightfit.train.precision import choose_device, choose_precision

GIB = 2**30


@dataclass(frozen=True)
class Fitted:
    """The job to run, the plan it follows (None without a GPU), and lines for the user."""

    job: Job
    plan: Plan | None
    lines: tuple[str, ...]


def fit_job(job: Job, cap_bytes: int | None = None) -> Fitted:
    """`job` with levers that fit here; on a machine without a GPU, as it is."""
    device = choose_device(job.device)
    if device.type != "cuda":
        sentence = "fit: there is no GPU to fit into, so the job is trained on the CPU with the levers it has"
        return Fitted(job.model_copy(update={"fit": False}), None, (sentence,))
    return fit_machine(job, this_machine(job.layout.ranks, cap_bytes), choose_precision(job.precision, device))


def this_machine(ranks: int, cap_bytes: int | None = None) -> Machine:
    """The GPUs that `ranks` processes use here, with the memory that is free on them and on the host."""
    free, total = torch.cuda.mem_get_info()
    listing = "\n".join(f"{torch.cuda.get_device_name()}, {total // 2**20}" for _ in range(ranks))
    machine = local_machine(usable_host_bytes(), listing)
    room = total if ranks > 1 else free + DEFAULT.context_bytes  # the context is there already, and in every plan
    return with_memory(machine, room if cap_bytes is None else min(room, cap_bytes))


def with_memory(machine: Machine, memory_bytes: int) -> Machine:
    """The same machine with cards of so much memory."""
    return replace(machine, accelerator=replace(machine.accelerator, usable_gib=memory_bytes / GIB))


def cap_memory(cap_bytes: int) -> None:
    """Make this process's GPU the size of `cap_bytes`, its CUDA context included."""
    if not torch.cuda.is_available():
        raise UserError("--memory makes a GPU smaller, but this machine has none; leave it out")
    total = torch.cuda.mem_get_info()[1]
    if cap_bytes <= 2 * DEFAULT.context_bytes:
        raise UserError(f"--memory is {cap_bytes / GIB:.2f} GiB, of which CUDA itself takes 0.5; give 2 GiB or more")
    torch.cuda.set_per_process_memory_fraction(min(1.0, (cap_bytes - DEFAULT.context_bytes) / total))


def fit_machine(job: Job, machine: Machine, precision: PrecisionName) -> Fitted:
    """`job` with the levers that are fastest on `machine`; an error where none fit."""
    workload = Workload.of_job(job, job_spec(job), precision, teacher_spec(job))
    question = Question(
        model=job.model.source,
        workload=workload,
        machine=machine,
        pins=_pins(job),
        steps=job.steps,
        job=job.model_dump(mode="json", exclude={"layout", "levers", "fit"}, exclude_unset=True),
    )
    found = answer(question)
    if not found.plan.fits:
        raise UserError(_refusal(found))
    decided = {"layout": found.plan.layout.model_dump(), "levers": found.plan.levers.model_dump(), "fit": False}
    fitted = Job.model_validate({**job.model_dump(), "precision": precision, **decided})
    return Fitted(fitted, found.plan, tuple(_reasons(job, found.plan)))


def job_spec(job: Job) -> ModelSpec:
    """The shape that will be trained; a tokenizer that is still to be trained is taken to fill its vocabulary."""
    shape = {**job.model.shape}
    if job.tokenizer.source == "train":
        shape["vocab_size"] = rounded_vocabulary(job.tokenizer.vocab_size)
    return job.experts.applied(reshaped(source_spec(job.model.source), shape, job.model.source))


def _pins(job: Job) -> Pins:
    """What the search may not change: the job's layout, its micro-batch if given, and the levers it sets."""
    layout = {name: value for name, value in job.layout if name != "micro_batch"}
    if "micro_batch" in job.layout.model_fields_set:
        layout["micro_batch"] = job.layout.micro_batch
    given = {name: getattr(job.levers, name) for name in job.levers.model_fields_set}
    return Pins(layout, given)


def _refusal(found: Answer) -> str:
    plan = found.plan
    ways = "; ".join(str(change) for change in found.changes[:3]) or "shorten data.sequence_length"
    if plan.missing_gpu_bytes > 0:
        room = plan.machine.accelerator.memory_bytes
        return (
            f"no levers make {plan.model} fit in {room / GIB:.1f} GiB: the nearest plan needs "
            f"{plan.missing_gpu_bytes / GIB:.1f} GiB more; it would fit with {ways}"
        )
    return (
        f"no levers make {plan.model} fit: the host is {plan.missing_host_bytes / GIB:.1f} GiB short; it would fit "
        f"with {ways}"
    )


def _reasons(job: Job, plan: Plan) -> list[str]:
    """What was picked and why, in a few lines."""
    room, host = plan.machine.accelerator.memory_bytes, plan.machine.host_bytes
    layout = plan.layout
    asked = peaks(plan.workload, layout, job.levers, INSTALLED).gpu_bytes
    plain_s = Costs(plan.workload, plan.machine).step(layout, job.levers).step_s
    parts = ", ".join(f"{name} {seconds / plan.step_seconds:.0%}" for name, seconds in plan.time.parts()[:4])
    as_given = "as the job has them" if job.levers.model_fields_set else "without levers"
    fits = "which fits" if asked <= room else f"{(asked - room) / GIB:.1f} GiB too much"
    said = [
        f"fit: {plan.machine.accelerator.name} with {room / GIB:.1f} GiB"
        + (f", host with {host / GIB:.1f} GiB free" if host is not None else ""),
        f"fit: {as_given} a step needs {asked / GIB:.1f} GiB, {fits}",
        f"fit: picked {describe_levers(plan.levers)}; micro-batch {layout.micro_batch}",
        f"fit: predicted {plan.gpu_peak_bytes / GIB:.1f} GiB on the GPU, {plan.host_peak_bytes / GIB:.1f} GiB on the "
        f"host, {plan.step_seconds:.2f} s a step ({plan.step_seconds / plain_s:.2f} × a step that just fits), {parts}",
    ]
    return said
