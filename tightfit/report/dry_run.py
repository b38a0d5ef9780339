"""What `tightfit train --dry-run` prints: the run that would start, and on how many ranks."""

from collections.abc import Iterator

from rich.console import Console

from tightfit.jobs.lever_table import describe_levers
from tightfit.plan.describe import describe_layout
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
    ranks = "1 rank" if job.layout.ranks == 1 else f"{job.layout.ranks} ranks"
    alone = "the CPU" if checked.device.type == "cpu" else "one GPU"
    yield "ranks", f"{ranks} on {checked.device.type}: {describe_layout(job.layout, alone=alone)}"
    yield "levers", "chosen at the start (fit)" if job.fit else describe_levers(job.levers)
    yield "data", f"{store.tokens_total:,} tokens in {store.documents:,} documents, {rows:,} rows to train on"
    yield "step", f"{job.global_batch} rows of {job.data.sequence_length} tokens, {checked.workload.tokens:,} tokens"
    yield "checkpoints", f"{gib(found.checkpoint_bytes)} each in {job.output}"
    yield "verdict", "all checks passed; nothing was started"
