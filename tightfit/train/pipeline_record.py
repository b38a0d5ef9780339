"""What a pipeline's ranks did when, in one step of a run: `pipeline.json` beside its metrics, for a picture.

Step RECORDED_STEP is recorded, the first that neither allocates memory nor opens connections. Starts and ends are
seconds since the first start, by a clock that all processes of a machine share; clocks of other machines are shifted
so that all ranks leave the barrier before the step at the same time. On a GPU the recorded step synchronizes after
every forward and backward of a micro-batch, so it is a little slower than the others.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from tightfit.durable import durable_file
from tightfit.parallel.pipeline import Pipeline
from tightfit.parallel.ranks import Ranks
from tightfit.train.metrics import SideFiles

RECORDED_STEP = 3
FILE = "pipeline.json"


def is_recorded(module: nn.Module, step: int) -> bool:
    """Whether a run records this step."""
    return isinstance(module, Pipeline) and step == RECORDED_STEP


@contextmanager
def recorded(module: nn.Module, step: int, ranks: Ranks, run: Path, side_files: SideFiles) -> Iterator[None]:
    """Around a training step; writes what its pipeline did if it is the one to record."""
    if not is_recorded(module, step):
        yield
        return
    assert isinstance(module, Pipeline)
    with record(module, ranks) as found:
        yield
    if ranks.first:
        with side_files.guarded(run / FILE), durable_file(run / FILE) as file:
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


@contextmanager
def record(module: Pipeline, ranks: Ranks) -> Iterator[dict[str, Any]]:
    """Yield a dict that holds the record of the steps inside after the block, on the first process."""
    found: dict[str, Any] = {}
    ranks.barrier()
    began = time.perf_counter()
    module.recorded = []
    yield found
    own = [(*slot[:3], slot.start_s - began, slot.end_s - began) for slot in module.recorded]
    module.recorded = None
    if not ranks.is_stage_leader:
        return
    everyones: list[Any] | None = [None] * ranks.stages if ranks.first else None
    dist.gather_object(own, everyones, group=ranks.stage_group, group_dst=0)
    if everyones is not None:
        found |= _described(module, everyones)


def _described(module: Pipeline, everyones: list[list[tuple[Any, ...]]]) -> dict[str, Any]:
    first = min(slot[3] for slots in everyones for slot in slots)
    keys = ("rank", "work", "batch", "stage", "start_s", "end_s")
    slots = [
        dict(zip(keys, (rank, work, batch, stage, start - first, end - first), strict=True))
        for rank, own in enumerate(everyones)
        for work, batch, stage, start, end in own
    ]
    layout = module.layout
    batches = 1 + max(slot["batch"] for slot in slots)
    entered = [slot for slot in slots if (slot["work"], slot["batch"], slot["stage"]) == ("forward", 0, 0)]
    return {
        "schedule": layout.schedule,
        "ranks": layout.pipeline,
        "pieces": layout.stages_per_rank,
        "micro_batches": batches,
        "steps": len(entered),
        "slots": slots,
    }
