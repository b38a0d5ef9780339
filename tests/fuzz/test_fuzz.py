"""Three hundred wrong inputs of every kind: each succeeds or is refused in a sentence, in bounded time and memory."""

import os
from pathlib import Path

import pytest

from tests.fuzz import containment
from tests.fuzz.__main__ import KINDS
from tests.fuzz.containment import run_cases
from tests.fuzz.materials import Materials
from tightfit.errors import UserError

CASES = 300


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    made = Materials(tmp_path_factory.mktemp("fuzz"))
    made.make_all()
    return made


def test_wrong_inputs_are_refused_in_a_sentence(given: Materials) -> None:
    assert len(KINDS) > 30
    found = [f"case {each.number} ({each.kind}): {each.what}" for each in run_cases(KINDS, range(CASES), 0, given)]
    assert found == []


def test_what_is_unchanged_is_accepted(given: Materials) -> None:
    """Else refusing everything would pass."""
    from tightfit.jobs.load import parse_job
    from tightfit.memory.comparison import compare, read_ledger
    from tightfit.models.loading import load_model
    from tightfit.models.sharded_weights import stored_tensors
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
    "memory": (lambda: len(b"x" * (300 * 2**20)), "takes 0.3 GiB"),
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
    assert [each.number for each in found] == [0, 2]
    assert all(words in each.what for each in found)
