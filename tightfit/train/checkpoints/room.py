"""Room on disk for a run's checkpoints, checked before the run begins.

A checkpoint holds weights, float32 masters where there are some, and both moments:
    bytes = parameters × (weight + master + moments)      two weights under schedule 2bw
The newest `saving.keep` stay, with `saving.keep_best` one more; while a checkpoint is written, it is one more again.
"""

import shutil
from pathlib import Path

from tightfit.counted import counted
from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.jobs.levers import Levers
from tightfit.jobs.state_format import moment_bytes
from tightfit.jobs.workload import Workload
from tightfit.models.resolve import checkpoints_of


def checkpoint_bytes(workload: Workload, levers: Levers, *, versions: int = 1) -> int:
    """Bytes of one checkpoint with `versions` of the weights, without its small files; where adapters are trained, of
    the adapters alone."""
    master = 4 if workload.has_masters else 0
    per_param = versions * workload.weight_bytes + master + moment_bytes(levers, wide=workload.updates_wide)
    trained = workload.spec.params() if workload.adapted is None else workload.adapted.params(workload.spec)
    return int(trained * per_param)


def added_checkpoints(job: Job, first_step: int, total_steps: int, existing: int) -> int:
    """The most checkpoints that there will be at once, less the `existing` ones."""
    every = job.saving.every or total_steps
    saves = total_steps // every - first_step // every + (total_steps % every > 0)
    return max(0, min(existing + saves, job.saving.keep + job.saving.keep_best + 1) - existing)


def refuse_full_disk(job: Job, workload: Workload, *, first_step: int, total_steps: int, replaces: bool) -> None:
    """Refuse a run whose checkpoints do not fit on the disk beside the existing ones."""
    existing = 0 if replaces else len(checkpoints_of(job.output))
    count = added_checkpoints(job, first_step, total_steps, existing)
    if replaces:
        count = min(count, 1)  # the old run is deleted after the first
    each = checkpoint_bytes(workload, job.levers, versions=1 + job.layout.has_two_versions)
    free = shutil.disk_usage(_existing(job.output)).free
    if each * count > free:
        raise UserError(
            f"output {job.output} has {_size(free)} free, but {counted(count, 'checkpoint')} of {_size(each)} each "
            "will be there at once; make room, lower saving.keep or choose another output"
        )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())
