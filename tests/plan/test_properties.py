"""Properties of the planner over many questions, drawn alike every time: plans are run, more is not slower."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from tests.covering import sampled, thorough
from tests.plan.dry_runs import questions, refusal_of, tried
from tests.plan.questions import question
from tightfit.hardware.catalog import CATALOG
from tightfit.hardware.machine import Machine, parse_machine
from tightfit.jobs.job import Job
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.refusals import refused_by_trainer
from tightfit.jobs.rules.rule import Run
from tightfit.jobs.workload import Workload
from tightfit.models.presets import PRESETS, preset
from tightfit.plan.answer import answer, make_workload
from tightfit.plan.cost import Costs
from tightfit.plan.search.fill import fill_card
from tightfit.plan.search.pins import Pins
from tightfit.plan.search.search import search
from tightfit.plan.search.space import SearchSpace

MODELS = sorted(PRESETS)
LENGTHS = (128, 511, 1024, 4096, 32768)
ROWS = (1, 2, 3, 8, 24)
SAME = 1.02
"""Of plans within 2 % of the fastest the simplest is taken."""


def machine_of(gpus: int, card: str, host: str | None = None) -> Machine:
    return parse_machine(f"{gpus}x{card}" if gpus < 16 or gpus % 8 else f"{gpus // 8}x8x{card}", host)


def spaces(count: int, most_gpus: int) -> Iterator[SearchSpace]:
    """Every preset and every card in turn."""
    draw = random.Random(most_gpus)
    for number in range(count):
        gpus = draw.randint(1, 8) if draw.random() < 0.3 else 2 ** draw.randint(0, most_gpus.bit_length() - 1)
        card = CATALOG[number % len(CATALOG)]
        host = draw.choice((None, "256GB"))
        machine = machine_of(gpus, card.name, None if card.shares_memory else host)
        spec = preset(MODELS[number % len(MODELS)])
        length = min(draw.choice(LENGTHS), spec.max_positions)
        workload = make_workload(spec, machine, sequence_length=length, rows=gpus * draw.choice(ROWS))
        yield SearchSpace(workload, machine, lossy=draw.random() < 0.2)


def is_run(workload: Workload, layout: Layout, levers: Levers) -> bool:
    """Whether the trainer's two doors let it in: a job's validation, and the rulebook with the model's shape."""
    fields = {"model": "x", "data": "x.txt", "output": "o", "steps": 1, "global_batch": workload.global_batch}
    job = Job.model_validate(
        fields | {"precision": workload.precision, "layout": layout.model_dump(), "levers": levers.model_dump()}
    )
    run = Run(
        layout=job.layout,
        levers=job.levers,
        precision=job.precision,
        accumulation=job.accumulation,
        spec=workload.spec,
        sequence_length=workload.sequence_length,
    )
    return refused_by_trainer(run) is None


@pytest.mark.parametrize("count", [60, thorough(500)])
def test_whatever_a_search_may_propose_is_run(count: int) -> None:
    """Any layouts and any levers that the search may choose for so many questions."""
    draw = random.Random(0)
    asked = 0
    for space in spaces(count, 1024):
        layouts = [layout for family in islice(space.families(), 12) for layout in family]
        for layout in draw.sample(layouts, min(2, len(layouts))):
            for levers in draw.sample(space.levers_of(layout), 2):
                assert is_run(space.workload, layout, levers), (layout, levers)
                asked += 1
    assert asked > 3 * count


@pytest.mark.parametrize("count", [9, thorough(24)])
def test_plans_run_dry(count: int, tmp_path: Path) -> None:
    """The whole answer of some questions, with pins, through the trainer's own dry run; `make dry-runs` asks 500."""
    found = [tried(asked, question, tmp_path) for asked, question in questions(count, seed=0, most_gpus=16)]
    plans = [each for each in found if each is not None]
    assert len(plans) > 2 / 3 * count
    assert sum(each.fits for each in plans) > count / 3
    assert [each for each in plans if each.refusal is not None] == []


FAMOUS = (
    ("llama-2-7b", "2xRTX3090", 2048, 16),
    ("mixtral-8x7b", "8xA100-80GB", 4096, 64),
    ("llama-3.1-70b", "8xH100-80GB", 4096, 64),
    ("llama-3.1-8b", "4xV100-32GB", 2048, 32),
)


@sampled(2)
@pytest.mark.parametrize(("model", "on", "length", "rows"), FAMOUS)
def test_famous_cases_fit_and_run(model: str, on: str, length: int, rows: int, tmp_path: Path) -> None:
    asked = question(model, on, length, rows)
    plan = answer(asked).plan
    assert plan.fits
    assert refusal_of(plan, tmp_path) is None


@pytest.mark.parametrize(("model", "card", "length", "rows"), [("llama-3.1-70b", "RTX4090", 4096, 8)])
def test_what_fits_one_gpu_fits_several(model: str, card: str, length: int, rows: int) -> None:
    """Also where it takes levers that only some layouts of several ranks have."""
    plans = [answer(question(model, f"{gpus}x{card}", length, rows)).plan for gpus in (1, 2, 4, 8)]
    assert all(plan.fits for plan in plans)
    assert plans[1].levers.update_in_backward
    times = [plan.step_seconds for plan in plans]
    assert times == sorted(times, reverse=True)


LARGER = (
    ("V100-16GB", "V100-32GB"),
    ("A100-40GB", "A100-80GB"),
    ("A100-80GB", "H100-80GB"),
    ("H100-80GB", "H200-141GB"),
)
"""Cards of which the second has no less of anything."""
ONE_BY_ONE = {"cuda_graph": "never"}
"""One GPU whose kernels are launched at once may be faster than two that are not; the plan then says so."""


def pairs(count: int) -> Iterator[tuple[str, SearchSpace, SearchSpace]]:
    """A question, and one that must not be answered with more seconds a step."""
    draw = random.Random(5)
    small = [name for name in MODELS if preset(name).layers <= 30 and not name.startswith("tiny")]
    for number in range(count):
        kind = ("more GPUs", "shorter rows", "a larger card")[number % 3]
        card, larger = draw.choice(LARGER)
        gpus, spec = draw.choice((1, 2, 4)), preset(draw.choice(small))
        length = min(draw.choice((512, 1024, 4096)), spec.max_positions)
        host = draw.choice((None, "512GB"))
        machine = machine_of(gpus, card, host)
        workload = make_workload(spec, machine, sequence_length=length, rows=draw.choice((8, 32)), precision="fp16")
        before = SearchSpace(workload, machine, Pins({}, ONE_BY_ONE if kind == "more GPUs" else {}))
        match kind:
            case "more GPUs":
                yield kind, before, replace(before, machine=machine_of(2 * gpus, card, host))
            case "shorter rows":
                yield kind, before, replace(before, workload=replace(workload, sequence_length=length // 2))
            case _:
                yield kind, before, replace(before, machine=machine_of(gpus, larger, host))


def with_host(space: SearchSpace) -> SearchSpace:
    """The same on a machine whose host is known to be large."""
    return replace(space, machine=replace(space.machine, host_bytes=2 * 10**12))


@pytest.mark.parametrize("count", [12, thorough(300)])
def test_more_gpus_shorter_rows_and_larger_cards_are_not_slower(count: int) -> None:
    compared = 0
    for kind, before, after in pairs(count):
        plan = search(before).best
        if plan is not None and before.machine.host_bytes is None and plan.host_bytes:
            # One of unknown size is used where nothing else fits, and by the larger machine then not.
            before, after = with_host(before), with_host(after)
            plan = search(before).best
        if plan is None:
            continue
        if kind == "more GPUs":
            plan = fill_card(before, plan)
        better = search(after).best
        assert better is not None, (kind, before.machine.text, plan.layout)
        assert better.step_s <= SAME * plan.step_s, (kind, before, plan.layout, plan.levers, better.layout)
        compared += 1
    assert compared > 0.9 * count


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_layouts_time_falls_with_its_rows_tokens(zero: int) -> None:
    """Not only the chosen plan's: of any one layout and levers, half of the tokens take no longer."""
    machine = machine_of(8, "A100-80GB")
    layout = Layout.model_validate({"data": 8, "zero": zero, "micro_batch": 1})
    times = []
    for length in (512, 1024, 2048, 4096):
        workload = make_workload(preset("llama-3.1-8b"), machine, sequence_length=length, rows=16)
        times.append(Costs(workload, machine).step(layout, Levers()).step_s)
    assert times == sorted(times)
