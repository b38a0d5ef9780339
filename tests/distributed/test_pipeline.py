"""The ranks of a pipeline train as one process does: losses, norms, every gradient, every weight, step after step."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.distributed.group import Group
from tests.distributed.piping import DEEP, Piped, joined, run_piped
from tests.distributed.test_equivalence import assert_same
from tests.distributed.training import GEMMA, GPT2, run
from tests.train.models import TINY_ROUTED
from tightfit.jobs.job import Optimizer
from tightfit.jobs.layout import PipelineSchedule
from tightfit.jobs.levers import Levers

Make = Callable[[int], Group]
DEEP_TIED = replace(DEEP, tied=True)
CLIPPED = Optimizer(lr=1e-3, eps=1e-4, clip_norm=0.1)
SCHEDULES: tuple[PipelineSchedule, ...] = ("gpipe", "1f1b", "zero-bubble")
CASES = {
    "gpipe": Piped(schedule="gpipe"),
    "naive": Piped(schedule="gpipe", micro_batch=8),
    "1f1b": Piped(),
    "1f1b-three-micro-batches": Piped(rows=12, micro_batch=4),
    "1f1b-fewer-micro-batches-than-ranks": Piped(pipeline=4, micro_batch=4),
    "interleaved": Piped(schedule="interleaved", stages_per_rank=2),
    "zero-bubble": Piped(schedule="zero-bubble"),
    "zero-bubble-four": Piped(pipeline=4, micro_batch=1, schedule="zero-bubble"),
    "1f1b-four": Piped(pipeline=4, micro_batch=1),
    **{f"{schedule}-tied": Piped(spec=DEEP_TIED, schedule=schedule) for schedule in SCHEDULES},
    "interleaved-tied": Piped(spec=DEEP_TIED, schedule="interleaved", stages_per_rank=2),
    **{
        f"{schedule}-checkpointed": Piped(schedule=schedule, levers=Levers(checkpoint_every=1))
        for schedule in SCHEDULES[:2]
    },
    "interleaved-checkpointed": Piped(
        schedule="interleaved", stages_per_rank=2, levers=Levers(checkpoint_every=2, loss_chunk_bytes=1)
    ),
    "clipped": Piped(pipeline=4, settings=CLIPPED),
    "clipped-tied": Piped(spec=DEEP_TIED, settings=CLIPPED),
    "plain-loss": Piped(levers=Levers(loss="plain")),
    "small-loss-chunks": Piped(levers=Levers(loss_chunk_bytes=1)),
    "tiled": Piped(levers=Levers(tiles=2)),
    "gemma": Piped(spec=replace(GEMMA, layers=5)),
    "learned-positions": Piped(spec=replace(GPT2, layers=5)),
    **{f"data-zero-{zero}": Piped(data=2, zero=zero, micro_batch=1) for zero in (0, 1)},
    **{f"data-zero-{zero}-tied": Piped(spec=DEEP_TIED, data=2, zero=zero, micro_batch=1) for zero in (0, 1)},
    "data-zero-1-clipped": Piped(data=2, zero=1, micro_batch=1, settings=CLIPPED),
    "data-zero-1-interleaved": Piped(data=2, zero=1, micro_batch=1, schedule="interleaved", stages_per_rank=2),
    "data-zero-1-zero-bubble": Piped(data=2, zero=1, micro_batch=1, schedule="zero-bubble"),
    "data-zero-1-checkpointed": Piped(data=2, zero=1, micro_batch=1, levers=Levers(checkpoint_every=2)),
    "data-zero-0-zero-bubble": Piped(data=2, micro_batch=1, schedule="zero-bubble"),
    **{
        f"tensor{name}": Piped(spec=spec, tensor=2, sequence_parallel=parts, schedule=schedule)
        for name, spec, parts, schedule in (
            ("", DEEP, False, "1f1b"),
            ("-sequence", DEEP, True, "1f1b"),
            ("-sequence-tied", DEEP_TIED, True, "gpipe"),
            ("-sequence-zero-bubble", DEEP, True, "zero-bubble"),
        )
    },
    "tensor-sequence-checkpointed": Piped(tensor=2, levers=Levers(checkpoint_every=1)),
    "tensor-interleaved": Piped(tensor=2, schedule="interleaved", stages_per_rank=2),
    "tensor-clipped": Piped(tensor=2, spec=DEEP_TIED, settings=CLIPPED),
    "tensor-data-zero-1": Piped(tensor=2, data=2, zero=1, micro_batch=1, steps=2),
    "tensor-data-zero-0-tied": Piped(spec=DEEP_TIED, tensor=2, data=2, micro_batch=1, steps=2),
}


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_trains_as_one_process_does(group: Make, name: str) -> None:
    case = CASES[name]
    found = group(case.layout.ranks).run(run_piped, case)
    assert all(trace.results == found[0].results for trace in found)
    assert_same(joined(found), run(case.whole()))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_routed_layers_count_their_balance_by_tokens(group: Make, schedule: PipelineSchedule) -> None:
    """Balance is not linear in rows, so the truth here takes the same micro-batches one after another."""
    case = Piped(spec=replace(TINY_ROUTED, layers=5), schedule=schedule)
    truth = run(replace(case.whole(), micro_batch=case.micro_batch))
    assert_same(joined(group(2).run(run_piped, case)), truth)
