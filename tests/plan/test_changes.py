"""What would fit, against every lossless set of levers tried by itself: nothing that fits is missed."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import ceil
from typing import Any

import pytest

from tests.covering import sampled, thorough
from tests.plan.questions import planned, question
from tightfit.errors import UserError
from tightfit.hardware.catalog import find_accelerator
from tightfit.jobs.layout import Layout
from tightfit.jobs.lever_table import LOSS_CHUNK_BYTES
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules import refusals
from tightfit.jobs.rules.refusals import refused_levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas import training
from tightfit.memory.formulas.overheads import INSTALLED, Overheads
from tightfit.memory.formulas.training import Peaks, peaks
from tightfit.plan.answer import Question, answer
from tightfit.plan.cost import states_key
from tightfit.plan.search import candidate, space
from tightfit.plan.search.lever_choices import NO_LEVERS, states_on_host
from tightfit.plan.search.search import search

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
                yield peaks(asked.workload, layout, levers, INSTALLED).gpu_bytes

    return min(needed_bytes for layout in asked.space.layouts() for needed_bytes in needed(layout))


def with_card(asked: Question, memory_bytes: int) -> Question:
    """The same question for a card of that size."""
    card = replace(asked.machine.accelerator, usable_gib=(memory_bytes + 0.5) / 2**30)
    assert card.memory_bytes == memory_bytes
    return replace(asked, machine=replace(asked.machine, accelerator=card))


def test_every_lever_saves_memory_is_lossy_or_saves_nothing_more() -> None:
    """A new lever must be entered above, and so is tried."""
    assert set(LOSSLESS) | SAVE_NOTHING_MORE | LOSSY == set(Levers.model_fields)


@sampled(2)
@pytest.mark.parametrize(
    "asked",
    [
        question("llama-3.2-1b", "A10-24GB", 2048, 1),
        question("llama-3.2-1b", "2xA10-24GB", 2048, 2),
        thorough(question("gemma-2-2b", "2xA10-24GB", 8192, 2)),
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


@sampled(2)
@pytest.mark.parametrize(
    ("model", "on", "length", "rows", "host"),
    [
        ("qwen2.5-32b", "2xRTX4090", 2048, 2, "128GB"),
        thorough("llama-3.1-70b", "4xA100-80GB", 4096, 8, "256GB"),
        ("mixtral-8x7b", "2xA100-80GB", 2048, 2, "64GB"),
    ],
)
def test_the_host_memory_that_is_asked_for_is_enough(model: str, on: str, length: int, rows: int, host: str) -> None:
    """Also while a checkpoint is written; and so is what a plan says that it needs where nobody said what there is."""
    refused = planned(model, on, length, rows, host=host)
    assert not refused.plan.fits
    wanted = [change.to for change in refused.changes if change.what == "more host memory"]
    size = int(wanted[0].removeprefix("--host-memory ").removesuffix("GB"))
    enough = planned(model, on, length, rows, host=f"{size}GB")
    assert enough.plan.fits
    assert enough.plan.host_peak_bytes <= size * 10**9
    left_open = planned(model, on, length, rows).plan
    assert planned(model, on, length, rows, host=f"{ceil(left_open.host_peak_bytes / 1e9)}GB").plan.fits


@pytest.mark.parametrize(
    ("on", "host", "offered"),
    [
        ("2xRTX4000SFFAda-20GB", "400GB", "1xRTX4000SFFAda-20GB"),  # which saves without copies of 371 GiB
        ("2x2xRTX3090:nvlink", "400GB", None),  # as two cards of each of two nodes fit, like four do
        ("2xRTX3090:nvlink", "400GB", "1xRTX3090"),
        ("2xRTX4000SFFAda-20GB", "300GB", None),
    ],
)
def test_fewer_cards_are_offered_where_they_fit(on: str, host: str, offered: str | None) -> None:
    """With the same batch, in the words and the time in which the plan of those cards is found."""
    answered = planned("qwen2.5-32b", on, 4096, 2, host=host)
    found = [change for change in answered.changes if change.what == "fewer cards"]
    assert [change.to for change in found] == ([] if offered is None else [offered])
    for change in found:
        fewer = planned("qwen2.5-32b", change.to, 4096, 2, host=host)
        assert fewer.plan.fits
        assert fewer.plan.step_seconds == pytest.approx(change.step_s, rel=0.05)
    if not found and not answered.plan.fits:
        assert not planned("qwen2.5-32b", on.removeprefix("2x"), 4096, 2, host=host).plan.fits


def test_states_kept_on_a_card_that_lacks_the_room_are_let_go() -> None:
    """The plan without the pin fits, so that the pin is named, and not a larger card alone."""
    pins = "levers.offload=optimizer", "levers.offload_keep_bytes=20000000000"
    refused = planned("llama-3.1-8b", "RTX4090", 2048, 1, *pins, host="256GB")
    assert not refused.plan.fits
    assert planned("llama-3.1-8b", "RTX4090", 2048, 1, pins[0], host="256GB").plan.fits
    assert "levers.offload_keep_bytes" in [change.to for change in refused.changes]


def test_a_chip_that_shares_its_memory_keeps_nothing_elsewhere() -> None:
    refused = planned("llama-3.1-8b", "M3-24GB", 2048, 1)
    assert not refused.plan.fits
    assert refused.plan.host_peak_bytes == 0
    offered = {change.what: change.to for change in refused.changes}
    assert offered["another card"] == "1xM2Ultra-192GB"
    assert not {"more host memory", "more cards"} & set(offered)


def test_the_nearest_plan_lacks_least_of_card_and_host() -> None:
    """A host that is short whatever is done does not hide how far from fitting a card is."""
    asked = question("llama-3.1-70b", "8xRTX3060", 2048, 8, host="64GB")
    pinned = question("llama-3.1-70b", "8xRTX3060", 2048, 8, "layout.zero=1", "layout.data=8", host="64GB")
    near, far = (each.plan(search(each.space).nearest) for each in (asked, pinned))
    assert near.missing_host_bytes > 0
    assert near.missing_gpu_bytes < far.missing_gpu_bytes


def test_what_an_engine_does_not_do_is_not_offered() -> None:
    asked = question("llama-3.1-70b", "8xA100-40GB", 4096, 16, engine="hf")
    offered = [change.to for change in answer(asked).changes]
    assert offered
    assert not [to for to in offered if "levers." in to or "layout." in to]


@pytest.mark.parametrize(
    ("pins", "rows", "words"),
    [
        ((), 3, ["global batch 3", "2 GPUs", "--engine hf", "a multiple of 2 rows"]),
        (("layout.stages_per_rank=3",), 4, ["layout.stages_per_rank=3", "--engine hf", "drop it"]),
    ],
)
def test_engines_are_named_and_not_what_they_leave_out(pins: tuple[str, ...], rows: int, words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        answer(question("llama-3.2-1b", "2xA100-80GB", 2048, rows, *pins, engine="hf"))
    assert all(word in str(refused.value) for word in words), refused.value
    assert "levers.loss" not in str(refused.value)


def test_other_cards_ask_the_rulebook_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes are looked for on every larger card of a vendor, some fifty of them, and rules know no cards."""
    asked = question("llama-3.2-1b", "4xRTX3060", 2048, 4).space
    card = find_accelerator("B200")
    pressed = asked.last_resort()
    assert pressed is not None
    said = [[(layout, each.levers_of(layout)) for layout in each.layouts()] for each in (asked, pressed)]
    for name in ("refused_workload", "refused_beside"):
        monkeypatch.setattr(f"tightfit.plan.search.space.{name}", None)  # who asks fails
    larger = asked.with_card(replace(asked.machine, accelerator=card))
    pressed = larger.last_resort()
    assert pressed is not None
    assert larger.machine.accelerator == pressed.machine.accelerator == card
    assert said == [[(layout, each.levers_of(layout)) for layout in each.layouts()] for each in (larger, pressed)]
    assert min(map(len, said)) > 5
    lossy = replace(asked, lossy=True)
    shorter = replace(asked, workload=replace(asked.workload, sequence_length=1536))
    with pytest.raises(TypeError):  # other sets of levers are asked about
        lossy.levers_of(next(lossy.layouts()))
    with pytest.raises(TypeError):  # and all of another workload
        next(shorter.layouts())


def test_changes_ask_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of cards or levers leaves most questions as they were: bounds of states, and rules about layouts."""
    asked: list[tuple[object, ...]] = []

    def least_peaks(workload: Workload, layout: Layout, levers: Levers, overheads: Overheads) -> Peaks:
        asked.append((workload, states_key(layout), states_on_host(levers), levers.update_in_backward))
        return training.least_peaks(workload, layout, levers, overheads)

    def refused(workload: Workload, layout: Layout, levers: Levers) -> str | None:
        asked.append((workload, layout, levers))
        return refusals.refused_workload(workload, layout, levers)

    monkeypatch.setattr(candidate, "least_peaks", least_peaks)
    monkeypatch.setattr(space, "refused_workload", refused)
    found = planned("llama-3.1-70b", "4xT4", 1000, 24, precision="fp16")  # a length that no other test asks for
    assert found.changes
    without_levers = [each for each in asked if len(each) == 4 or each[2] == NO_LEVERS]
    assert len(without_levers) > 500
    assert len(set(without_levers)) == len(without_levers)
