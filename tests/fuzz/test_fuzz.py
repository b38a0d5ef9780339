"""Wrong inputs of every kind: each succeeds or is refused in a sentence, in bounded time and memory."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.covering import thorough
from tests.fuzz import containment, lanes
from tests.fuzz.__main__ import KINDS
from tests.fuzz.containment import Make
from tests.fuzz.lanes import Outcome, run_cases
from tests.fuzz.materials import Materials
from tests.programs import call_forked
from tests.speed import million_turns_s
from tightfit.errors import UserError

CASES = 120


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    made = Materials(tmp_path_factory.mktemp("fuzz"))
    made.make_all()
    return made


@pytest.mark.parametrize("numbers", [range(CASES), thorough(range(CASES, 300))], ids=["first", "more"])
def test_wrong_inputs_are_refused_in_a_sentence(numbers: range, tmp_path: Path) -> None:
    assert 30 < len(KINDS) <= CASES / 3, "each kind several times"
    code, stdout, stderr = call_forked(tmp_path, _tell_outcomes, str(tmp_path), numbers)
    assert code == 0, stderr
    outcomes = [Outcome(*each) for each in map(json.loads, stdout.splitlines())]
    assert sorted(each.number for each in outcomes) == list(numbers)
    assert [f"case {each.number} ({each.kind}): {each.what}" for each in outcomes if each.what] == []


def _tell_outcomes(folder: str, numbers: range) -> None:
    """Print what each case did.

    In a process that has not computed: where torch is built for CUDA, children of one that has gone backward cannot.
    """
    given = Materials(Path(folder))
    given.make_all()
    for each in run_cases(KINDS, numbers, 0, given):
        print(json.dumps([each.number, each.kind, each.what]))


def test_the_makefile_says_how_many_are_run() -> None:
    makefile = Path(__file__).parents[2] / "Makefile"
    assert f"`make test` runs {CASES} and" in makefile.read_text()


def test_what_is_unchanged_is_accepted(given: Materials) -> None:
    """Else refusing everything would pass."""
    from tightfit.jobs.load import parse_job
    from tightfit.memory.comparison import compare, read_ledger
    from tightfit.models.files.sharded_weights import stored_tensors
    from tightfit.models.loading import load_model
    from tightfit.plan.plan import Plan
    from tightfit.train.checkpoints.directory import read_position

    assert parse_job(given.job_text, "job.yaml").steps == 5
    assert load_model(str(given.model)).tokenizer is not None
    assert load_model(str(given.folder / "model.gguf")).tokenizer is not None
    assert stored_tensors(given.pieces)
    assert Plan.from_json(given.plan, "plan").layout.ranks == 8
    assert read_position(given.run / "checkpoints" / "step-00000002").step == 2
    assert compare(*[read_ledger(_written(given))] * 2).allocated


def _written(given: Materials) -> Path:
    import json

    path = given.folder / "a-plan.json"
    path.write_text(json.dumps(given.plan))
    return path


FAULTS = {
    "a traceback": (lambda: [][0], "IndexError"),
    "memory": (lambda: len(b"x" * (448 * 2**20)), "takes 0.4 GiB"),  # far from both bounds, 1/4 and 1/2 GiB
    "an end": (lambda: os._exit(3), "ends the process (3)"),
    "a program": (lambda: os.system("true"), "executes"),
    "no sentence": (lambda: (_ for _ in ()).throw(UserError("")), "no sentence"),
}


@pytest.mark.parametrize(("fault", "words"), FAULTS.values(), ids=FAULTS)
def test_faults_are_found(given: Materials, fault: object, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The containment sees what it is there for, and goes on behind it."""
    monkeypatch.setattr(containment, "MOST_BYTES", 2**28)
    kinds = {"fault": lambda *_: fault, "good": lambda *_: lambda: None}
    found = list(run_cases(kinds, range(4), 0, given))  # type: ignore[arg-type]
    assert [each.number for each in found if each.what] == [0, 2]
    assert all(words in each.what for each in found if each.what)


def test_a_case_that_hangs_is_ended_and_named(given: Materials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MILLION_TURNS", 0.25 / million_turns_s())
    found = list(run_cases({"sleep": lambda *_: lambda: time.sleep(60), "good": _good}, range(4), 0, given, jobs=2))
    assert {each.number: each.what for each in found} == {0: "hangs", 1: "", 2: "hangs", 3: ""}


def test_cases_are_shared_among_jobs_by_whole_rounds(given: Materials) -> None:
    """Every case once, and each lane has every kind."""
    shared = run_cases({"good": _good, "process": lambda *_: _say_process}, range(12), 0, given, jobs=3)
    outcomes = sorted(shared, key=lambda each: each.number)
    assert [each.number for each in outcomes] == list(range(12))
    lanes_of_cases = [each.what[-40:] for each in outcomes if each.kind == "process"]
    assert lanes_of_cases[:3] == lanes_of_cases[3:]
    assert len(set(lanes_of_cases)) == 3


def test_no_case_is_begun_past_the_deadline(given: Materials) -> None:
    slow: dict[str, Make] = {"slow": lambda *_: lambda: time.sleep(0.05)}
    done = list(run_cases(slow, range(1000), 0, given, jobs=2, deadline=time.monotonic() + 3))
    assert 0 < len(done) < 1000, "all would sleep for 25 s"
    assert not any(each.what for each in done)


def _good(*_: object) -> Callable[[], None]:
    return lambda: None


def _say_process() -> None:
    raise RuntimeError(f"process {os.getpid()}")
