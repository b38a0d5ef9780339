"""A dry run: every check that a run makes before its first allocation, and a description of how it would begin.

It needs no GPU and no second process: one process checks a job for many ranks, in the precision its device would have.
A failed check raises the same UserError as the run would. Data is tokenized into the cache of the run.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from tightfit.jobs.job import Job
from tightfit.jobs.paths import with_absolute_paths
from tightfit.memory.formulas.overheads import INSTALLED
from tightfit.memory.formulas.training import peaks
from tightfit.parallel.ranks import ALONE
from tightfit.train.checkpoints.room import checkpoint_bytes
from tightfit.train.checks import CheckedRun, check_run
from tightfit.train.progress import RunProgress
from tightfit.train.run_directory import Decision, Start, decide


@dataclass(frozen=True)
class DryRun:
    """A checked job, and what its run would do with the output directory."""

    checked: CheckedRun
    decision: Decision

    @property
    def begins(self) -> str:
        """How the run would begin."""
        output = self.checked.job.output
        if self.decision.checkpoint is None:
            return f"anew in {output}, whose run it replaces" if self.decision.replaces else f"anew in {output}"
        later = f"; {len(self.decision.later)} later ones move aside" if self.decision.later else ""
        return f"from {self.decision.checkpoint}{later}"

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint on disk."""
        job = self.checked.job
        return checkpoint_bytes(self.checked.workload, job.levers, versions=1 + job.layout.has_two_versions)

    @property
    def gpu_bytes(self) -> int | None:
        """Predicted peak of a GPU; None where its levers are chosen at the start."""
        job = self.checked.job
        return None if job.fit else peaks(self.checked.workload, job.layout, job.levers, INSTALLED).gpu_bytes

    @property
    def room_bytes(self) -> int | None:
        """Memory of this machine's GPU; None where it has none."""
        return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        checked, job = self.checked, self.checked.job
        return {
            "output": str(job.output),
            "begins": self.begins,
            "checkpoint": None if self.decision.checkpoint is None else str(self.decision.checkpoint),
            "first_step": checked.first_step,
            "steps": checked.total_steps,
            "is_finished": checked.is_finished,
            "ranks": job.layout.ranks,
            "layout": job.layout.model_dump(),
            "levers": job.levers.model_dump(),
            "precision": checked.precision,
            "device": checked.device.type,
            "params": checked.spec.params(),
            "tokens_per_step": checked.workload.tokens,
            "data_tokens": checked.data.store.tokens_total,
            "documents": checked.data.store.documents,
            "rows": len(checked.data.train),
            "held_out_rows": 0 if checked.data.held_out is None else len(checked.data.held_out),
            "checkpoint_bytes": self.checkpoint_bytes,
            "gpu_peak_bytes": self.gpu_bytes,
        }


def dry_run(
    job: Job,
    *,
    resume: bool | Literal["auto"] = False,
    overwrite: bool = False,
    checkpoint: str | None = None,
    quiet: bool = False,
) -> DryRun:
    """What `run_job` would do with the same arguments; raises the UserError with which it would refuse."""
    job, start = with_absolute_paths(job), Start(resume=resume, overwrite=overwrite, checkpoint=checkpoint)
    decision = decide(job.output, start)
    device = torch.device("cuda" if job.device == "cuda" or _has_gpu(job) else "cpu")
    with RunProgress(0, 0, quiet) as notes:
        checked = check_run(
            job,
            decision.checkpoint,
            notes.say,
            show_bars=not quiet,
            device=device,
            ranks=replace(ALONE, world=job.layout.data),
            replaces=decision.replaces,
        )
    return DryRun(checked, decision)


def _has_gpu(job: Job) -> bool:
    return job.device == "auto" and torch.cuda.is_available()
