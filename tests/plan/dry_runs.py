"""Random questions to the planner, each answer run dry: no plan may be refused by the trainer.

Every preset, every card, 1 to 1,024 GPUs, random rows, lengths and pins. The dry run is the trainer's own, up to the
first allocation; only text and tokenizer, the disk and this machine's memory are left out, as they are not the plan's.

    python -m tests.plan.dry_runs --questions 500 --seed 1
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tightfit.errors import UserError
from tightfit.hardware.catalog import CATALOG
from tightfit.hardware.machine import parse_machine
from tightfit.jobs.job import Job
from tightfit.models.presets import PRESETS, preset
from tightfit.plan import answer as planner
from tightfit.plan.answer import Question, answer, make_workload
from tightfit.plan.job import job_of_plan
from tightfit.plan.plan import Plan
from tightfit.plan.search.pins import parse_pins
from tightfit.train import checks
from tightfit.train.dry_run import dry_run

MODELS = sorted(PRESETS)
LENGTHS = (128, 511, 1024, 2048, 4096, 16384, 32768)
ROWS = (1, 2, 3, 8, 24)
HOSTS = (None, "256GB", "2TB")
PINS = (
    "layout.zero=3",
    "layout.zero=1",
    "layout.tensor=2",
    "layout.pipeline=2",
    "layout.micro_batch=1",
    "layout.sequence_parallel=false",
    "levers.offload=optimizer",
    "levers.offload=weights",
    "levers.offload=none",
    "levers.checkpoint_every=1",
    "levers.offload_checkpoints=true",
    "levers.tiles=4",
    "levers.update_in_backward=true",
    "levers.optimizer_states=8bit",
    "levers.offload_update=host",
)


@dataclass(frozen=True)
class Tried:
    """What came of one question: a plan that runs, one that does not, or a sentence instead of a plan."""

    asked: str
    fits: bool
    refusal: str | None


def questions(count: int, seed: int, most_gpus: int = 1024) -> Iterator[tuple[str, Question]]:
    """Drawn alike for a seed; as they would be typed, and as the planner takes them."""
    draw = random.Random(seed)
    for number in range(count):
        card, model = CATALOG[number % len(CATALOG)].name, MODELS[number % len(MODELS)]
        gpus = draw.randint(1, 8) if draw.random() < 0.3 else 2 ** draw.randint(0, most_gpus.bit_length() - 1)
        on = f"{gpus}x{card}" if gpus < 16 else f"{gpus // 8}x8x{card}"
        spec, host = preset(model), draw.choice(HOSTS)
        length, rows = min(draw.choice(LENGTHS), spec.max_positions), gpus * draw.choice(ROWS)
        pins = draw.sample(PINS, draw.choice((0, 0, 0, 1, 2)))
        host = None if CATALOG[number % len(CATALOG)].shares_memory else host
        machine = parse_machine(on, host)
        workload = make_workload(spec, machine, sequence_length=length, rows=rows)
        asked = f"{model} --on {on} --seq {length} --global-batch {rows} {' '.join(pins)} {host or ''}"
        lossy = draw.random() < 0.2
        yield (
            asked,
            Question(model=model, workload=workload, machine=machine, pins=parse_pins(pins), lossy=lossy),
        )


def tried(asked: str, question: Question, folder: Path) -> Tried | None:
    """None where pins and model leave nothing to plan, which the planner says in a sentence.

    What would have to change for a plan to fit is not asked: it is no part of the plan, and takes a hundred searches.
    """
    try:
        with patch.object(planner, "changes", lambda space: ()):
            plan = answer(question).plan
    except UserError:
        return None
    return Tried(asked, plan.fits, refusal_of(plan, folder))


def refusal_of(plan: Plan, folder: Path) -> str | None:
    """The sentence with which the trainer refuses `plan`; None where it would run it."""
    try:
        job = job_of_plan(plan, "plan.json", [f"data.train={folder}", f"output={folder / 'run'}"], steps=1)
        with _own_text(plan):
            dry_run(job, quiet=True)
    except UserError as error:
        return str(error)
    return None


@contextmanager
def _own_text(plan: Plan) -> Iterator[None]:
    """The dry run without tokenizer and text, disk and host memory of this machine."""
    store = SimpleNamespace(tokens_total=10**9, documents=1, fingerprint="x")
    data = SimpleNamespace(store=store, train=range(10**6), held_out=None)

    def found(job: Job, *_: Any) -> tuple[Any, Any, Any]:
        checks._refuse_split(plan.workload.spec, job)
        return plan.workload.spec, None, data

    with ExitStack() as stack:
        for name, stand_in in (("_found", found), ("_refuse_shortages", lambda *_, **__: None)):
            stack.enter_context(patch.object(checks, name, stand_in))
        yield


def main() -> int:
    """Try them all; the exit code is 1 where a plan was refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=1024)
    chosen = parser.parse_args()
    results: list[Tried] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, each in enumerate(questions(chosen.questions, chosen.seed, chosen.gpus), 1):
            found = tried(*each, Path(folder))
            results += [] if found is None else [found]
            if found is not None and found.refusal is not None:
                print(f"refused: {found.asked}: {found.refusal}", flush=True)
            if number % 50 == 0:
                print(_summary(number, results), flush=True)
    print(_summary(chosen.questions, results))
    return int(any(each.refusal for each in results))


def _summary(asked: int, results: list[Tried]) -> str:
    fitting, refused = sum(each.fits for each in results), sum(each.refusal is not None for each in results)
    return f"{asked} questions, {len(results)} plans, {fitting} fit, {refused} refused"


if __name__ == "__main__":
    sys.exit(main())
