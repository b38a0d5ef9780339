"""What `tightfit train --dry-run` prints: the run that would start, and on how many ranks."""

from collections.abc import Iterator

from rich.console import Console

from tightfit.counted import counted
from tightfit.jobs.lever_table import describe_levers
from tightfit.plan.describe import describe_adapters, describe_layout
from tightfit.report.tables import count_name, gib, print_json
from tightfit.train.dry_run import DryRun


def print_dry_run(found: DryRun, *, as_json: bool) -> None:
    """A line per fact, or one JSON object."""
    if as_json:
        return print_json(found.to_json())
    console = Console(highlight=False, soft_wrap=True)
    for name, value in _facts(found):
        console.print(f"{name:>12}  {value}", markup=False)


def _facts(found: DryRun) -> Iterator[tuple[str, str]]:
    checked, job = found.checked, found.checked.job
    store, rows = checked.data.store, len(checked.data.train)
    yield "begins", found.begins
    yield "steps", f"{checked.first_step:,} to {checked.total_steps:,}" + (" (finished)" if checked.is_finished else "")
    yield "model", f"{job.model.source}, {count_name(checked.spec.params())} parameters, {checked.precision}"
    if said := describe_adapters(checked.workload):
        yield "adapters", said
    alone = "the CPU" if checked.device.type == "cpu" else "one GPU"
    layout = describe_layout(job.layout, alone=alone)
    yield "ranks", f"{counted(job.layout.ranks, 'rank')} on {checked.device.type}: {layout}"
    yield "levers", "chosen at the start (fit)" if job.fit else describe_levers(job.levers)
    texts = f"{store.tokens_total:,} tokens in {counted(store.documents, 'document')}"
    yield "data", f"{texts}, {counted(rows, 'row')} to train on"
    batch = f"{counted(job.global_batch, 'row')} of {job.data.sequence_length:,} tokens"
    yield "step", f"{batch}, {checked.workload.tokens:,} tokens"
    if (gpu_bytes := found.gpu_bytes) is not None:
        yield (
            "memory",
            f"{gib(gpu_bytes)} a GPU in {checked.precision}, predicted{_beside(gpu_bytes, found.room_bytes)}",
        )
    yield "checkpoints", f"{gib(found.checkpoint_bytes)} each in {job.output}"
    yield "verdict", "all checks passed; nothing was started"


def _beside(gpu_bytes: int, room_bytes: int | None) -> str:
    """What that is beside the memory of this machine's GPU, or who tells whether it fits another's."""
    if room_bytes is None:
        return "; `tightfit plan` says on which cards it fits"
    if gpu_bytes <= room_bytes:
        return f"; this one has {gib(room_bytes)}"
    return f", more than this one's {gib(room_bytes)}; --fit looks for levers with which it fits"
