"""What would fit, against every lossless set of levers tried by itself: nothing that fits is missed."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.plan.questions import question
from tightfit.jobs.layout import Layout
from tightfit.jobs.lever_table import LOSS_CHUNK_BYTES
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.refusals import refused_levers
from tightfit.memory.formulas.training import peaks
from tightfit.plan.answer import Question, answer

LOSSLESS = {
    "checkpoint_every": (0, 1),
    "tiles": (1, 8, 64),
    "loss_chunk_bytes": (LOSS_CHUNK_BYTES, 0),
    "offload": ("none", "optimizer", "weights"),
    "offload_gradient_bytes": (2**30, 0),
    "offload_checkpoints": (False, True),
    "update_in_backward": (False, True),
}
"""Levers that can save memory without a loss, from not pulled to pulled."""
SAVE_NOTHING_MORE = {
    "num_checkpoints",
    "checkpoint_keep",
    "checkpoint_budget_bytes",
    "checkpoint_host_bytes",
    "loss",
    "offload_keep_bytes",
    "offload_update",
    "rounding",
    "cuda_graph",
}
LOSSY = {"optimizer_states", "matmul", "checkpoint_format"}


def every_set() -> Iterator[Levers]:
    for values in product(*LOSSLESS.values()):
        pulled: dict[str, Any] = dict(zip(LOSSLESS, values, strict=True))
        levers = Levers.model_construct(**pulled)
        if refused_levers(levers) is None:
            yield levers


def least_bytes(asked: Question) -> int:
    """What a card must hold for any layout with any set."""
    sets = list(every_set())

    def needed(layout: Layout) -> Iterator[int]:
        for levers in sets:
            if asked.space.refusal(layout, levers) is None:
                yield peaks(asked.workload, layout, levers).gpu_bytes

    return min(needed_bytes for layout in asked.space.layouts() for needed_bytes in needed(layout))


def with_card(asked: Question, memory_bytes: int) -> Question:
    """The same question for a card of that size."""
    card = replace(asked.machine.accelerator, usable_gib=(memory_bytes + 0.5) / 2**30)
    assert card.memory_bytes == memory_bytes
    return replace(asked, machine=replace(asked.machine, accelerator=card))


def test_every_lever_saves_memory_is_lossy_or_saves_nothing_more() -> None:
    """A new lever must be entered above, and so is tried."""
    assert set(LOSSLESS) | SAVE_NOTHING_MORE | LOSSY == set(Levers.model_fields)


@pytest.mark.parametrize(
    "asked",
    [
        question("llama-3.2-1b", "A10-24GB", 2048, 1),
        question("llama-3.2-1b", "2xA10-24GB", 2048, 2),
        question("gemma-2-2b", "2xA10-24GB", 8192, 2),
        question("llama-3.1-8b", "A10-24GB", 32768, 1),
        question("qwen3-30b-a3b", "A100-80GB", 1024, 1),
    ],
    ids=lambda asked: f"{asked.model} {asked.machine.text} {asked.workload.sequence_length}",
)
def test_no_lossless_way_is_missed(asked: Question) -> None:
    least = least_bytes(asked)
    enough = answer(with_card(asked, least))
    levers = [change for change in enough.changes if change.to.startswith("-o levers.")]
    assert enough.plan.fits or levers, [str(change) for change in enough.changes]
    assert all(change.step_s > 0 for change in enough.changes)
    short = answer(with_card(asked, least - 1))
    assert not short.plan.fits
    assert not [change for change in short.changes if change.to.startswith("-o levers.")]


def test_pure_bf16_is_offered_with_its_price() -> None:
    """Where it alone is enough: on a card of what the leanest plan in it needs."""
    asked = question("llama-3.2-1b", "A10-24GB", 2048, 1, "levers.offload=none")
    pure = replace(asked, workload=replace(asked.workload, precision="pure-bf16"))
    least = answer(with_card(pure, 2**30)).plan.gpu_peak_bytes
    offered = answer(with_card(asked, least)).changes
    assert any(change.to == "--precision pure-bf16 (lossy)" and change.step_s > 0 for change in offered)
