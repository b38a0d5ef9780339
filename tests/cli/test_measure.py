"""`tightfit measure`, `compare`, `train plan.json`, `picture timeline` as users run them; mistakes get a sentence."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.reports.documentation import ROOT
from tests.report.test_memory_pictures import text_of
from tests.train.jobs import tiny_job
from tightfit.jobs.job import Job
from tightfit.memory.ledger import Ledger
from tightfit.plan.job import job_of_plan, overridden
from tightfit.plan.plan import Plan

PLANNED = ("plan", "tiny-llama", "--on", "A100-80GB", "--seq", "32", "--global-batch", "4", "--precision", "fp32")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def plan_file(tmp_path: Path, tightfit: Any) -> Path:
    made = tightfit(*PLANNED, "--save", tmp_path / "plan.json")
    assert made.code == 0, made.err
    return tmp_path / "plan.json"


@pytest.fixture
def its_own(tmp_path: Path, corpus: Path, token_cache: Path) -> list[str]:
    """What a plan does not say: data, output, steps, and a tokenizer for a model that has none."""
    fields = {
        "data.train": corpus,
        "data.cache": token_cache,
        "data.held_out": 0.1,
        "output": tmp_path / "run",
        "steps": 2,
        "tokenizer.source": "train",
        "tokenizer.vocab_size": 512,
    }
    return [word for name, value in fields.items() for word in ("-o", f"{name}={value}")]


@pytest.fixture
def job_file(tmp_path: Path, corpus: Path, token_cache: Path) -> Path:
    job = tiny_job(tmp_path / "run", corpus, token_cache)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.model_dump(mode="json")))
    return path


def test_measure_prints_and_writes_the_ledger(job_file: Path, tightfit: Any) -> None:
    made = tightfit("measure", job_file, "--steps", 2)
    assert made.code == 0, made.err
    for word in ("forward", "◀", "optimizer states", "allocated", "Largest tensors", "layers.*.mlp", "2 steps"):
        assert word in made.out
    run = job_file.parent / "run"
    assert sorted(path.name for path in run.iterdir()) == ["ledger.json", "memory.png"]
    assert (run / "memory.png").read_bytes().startswith(b"\x89PNG")
    ledger = Ledger.from_json(json.loads((run / "ledger.json").read_text()), "the run")
    assert (ledger.source, ledger.fullest("host")[0] in ("loss", "backward")) == ("measurement", True)


def test_measure_as_json_is_the_file(job_file: Path, tightfit: Any) -> None:
    made = tightfit("measure", job_file, "--steps", 1, "--json")
    written = json.loads((job_file.parent / "run" / "ledger.json").read_text())
    assert {name: made.json[name] for name in written} == written
    assert made.json["picture"].endswith("memory.png")
    assert made.json["largest"][0].keys() >= {"bytes", "count", "component", "module", "operation"}


def test_a_measurement_beside_itself_has_no_error(job_file: Path, tightfit: Any) -> None:
    tightfit("measure", job_file, "--steps", 1)
    run = job_file.parent / "run"
    data = tightfit("compare", run, run / "ledger.json", "--json").json
    assert {line["error"] for line in data["lines"]} == {0}
    assert data["allocated"]["error"] == 0


def test_a_plan_is_trained_measured_and_compared(plan_file: Path, its_own: list[str], tightfit: Any) -> None:
    trained = tightfit("train", plan_file, *its_own)
    assert trained.code == 0, trained.err
    for word in ("The plan beside the run", "predicted, A100-80GB", "peak memory", "tokens/s", "2 of 2"):
        assert word in trained.out
    assert "did not follow the plan" not in trained.out
    run = plan_file.parent / "run"
    job = Job.model_validate(yaml.safe_load((run / "job.yaml").read_text()))
    plan = Plan.load(plan_file)
    assert (job.layout, job.levers, job.global_batch) == (plan.layout, plan.levers, 4)
    assert (job.data.sequence_length, job.precision, job.steps) == (32, "fp32", 2)

    assert tightfit("measure", plan_file, *its_own, "--steps", 1).code == 0
    shown = tightfit("compare", plan_file, run)
    assert shown.code == 0, shown.err
    data = tightfit("compare", plan_file, run, "--json").json
    assert (data["predicted_source"], data["measured_source"], data["place"]) == ("formulas", "measurement", "host")
    states = {line["component"]: line for line in data["lines"] if line["phase"] == "optimizer"}
    params = json.loads((run / "ledger.json").read_text())["params"]
    for component, size in (("weights", 4), ("optimizer states", 8)):
        line = states[component]
        assert line["measured_bytes"] == pytest.approx(size * params, rel=1e-3), "step counters apart"
        assert line["predicted_bytes"] == pytest.approx(size * plan.workload.spec.params(), rel=1e-3)
        assert f"{line['measured_bytes'] / 2**20:.2f} MiB" in shown.out
    assert f"{data['allocated']['error']:+.1%}" in shown.out


def test_training_a_plan_as_json(plan_file: Path, its_own: list[str], tightfit: Any) -> None:
    made = tightfit("train", plan_file, *its_own, "-o", "tokenizer.vocab_size=320", "-o", "global_batch=8", "--json")
    plan, said = Plan.load(plan_file), made.json["prediction"]
    assert said["peak_allocated_bytes"] == plan.ledger.peak_allocated_bytes()
    assert said["tokens_per_second"] == plan.tokens_per_second
    assert said["peak_error"] == pytest.approx(said["peak_allocated_bytes"] / made.json["peak_bytes"] - 1)
    notes = " ".join(said["notes"])
    assert "global_batch is 8 and was planned as 4" in notes
    assert f"the plan counted with {plan.workload.spec.params():,}" in notes


def test_a_plan_of_a_job_file_needs_nothing_more(job_file: Path, tmp_path: Path, tightfit: Any) -> None:
    saved = tmp_path / "planned.json"
    assert tightfit("plan", job_file, "--on", "A100-80GB", "--save", saved).code == 0
    plan = Plan.load(saved)
    job = job_of_plan(plan, "here")
    assert (job.output, job.steps, job.layout) == (tmp_path / "run", 5, plan.layout)
    assert overridden(plan, job) is None
    other = job.model_copy(update={"levers": job.levers.model_copy(update={"checkpoint_every": 7})})
    assert overridden(plan, other) == f"levers.checkpoint_every is 7 and was planned as {plan.levers.checkpoint_every}"


def test_picture_of_a_simulated_step(tmp_path: Path, tightfit: Any) -> None:
    made = tightfit(
        "picture",
        "timeline",
        "--model",
        "tiny-llama",
        "--seq",
        64,
        "--out",
        tmp_path / "t.svg",
        "-o",
        "levers.checkpoint_every=1",
    )
    assert made.code == 0, made.err
    words = text_of(tmp_path / "t.svg")
    for word in ("forward", "backward", "optimizer", "levers.checkpoint_every=1", "allocations and frees"):
        assert word in words


def test_the_pages_commands_are_understood(
    tmp_path: Path, corpus: Path, token_cache: Path, tightfit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of docs/memory.md about measuring, in their order, on a smaller model and the corpus."""
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    commands = re.findall(r"^tightfit ((?:measure|compare|plan|train|picture timeline) .*)$", page, flags=re.MULTILINE)
    assert {command.split()[0] for command in commands} >= {"measure", "compare", "plan", "train", "picture"}
    job = tiny_job(tmp_path / "runs" / "mine", corpus, token_cache)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json")))
    (tmp_path / "notes").symlink_to(corpus)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    smaller = {"llama-3.2-1b": "tiny-llama", "local": "A100-80GB", "2048": "32", "8192": "64"}
    for command in commands:
        words = [smaller.get(word, word) for word in shlex.split(command)]
        if words[0] == "plan":
            words += ["--precision", "fp32"]
        if words[0] in ("measure", "train") and "plan.json" in words:
            words += ["-o", "tokenizer.source=train", "-o", "tokenizer.vocab_size=320", "-o", "steps=2"]
        made = tightfit(*words)
        assert made.code == 0, (command, made.err)


MISTAKES = [
    (["measure", "absent.yaml"], ["absent.yaml"]),
    (["measure", "JOB", "-o", "data.train=absent.txt"], ["absent.txt"]),
    (["measure", "JOB", "-o", "output=FILE"], ["FILE", "not a directory"]),
    (["measure", "JOB", "-o", "layout.tensor=2", "-o", "levers.loss=plain"], ["levers.loss is plain", "layout.tensor"]),
    (["measure", "JOB", "-o", "layout.data=2"], ["2 rank(s)", "1 process(es)", "torchrun --nproc-per-node=2"]),
    (["measure", "JOB", "-o", "layout.tensor=2"], ["2 rank(s)", "1 process(es)", "torchrun --nproc-per-node=2"]),
    (["measure", "FILE.json"], ["FILE.json", "make a plan"]),
    (["train", "absent.json"], ["absent.json", "tightfit plan --save"]),
    (["train", "FILE.json"], ["FILE.json", "is not JSON"]),
    (["train", "PLAN"], ["-o data.train=FILES -o output=DIRECTORY -o steps=COUNT"]),
    (["train", "PLAN", "-o", "data.train=x", "-o", "steps=2"], ["PLAN", "add -o output=DIRECTORY"]),
    (
        [
            "train",
            "PLAN",
            "-o",
            "data.train=x",
            "-o",
            "steps=2",
            "-o",
            "output=y",
            "-o",
            "layout.pipeline=2",
            "-o",
            "layout.data=2",
            "-o",
            "layout.micro_batch=1",
        ],
        ["4 rank(s)", "1 process(es)", "torchrun --nproc-per-node=4 -m tightfit train"],
    ),
    (["train", "PLAN", "-o", "data.train=x", "-o", "steps=2", "-o", "output=y", "-o", "layout.nodes=2"], ["nodes"]),
    (["compare", "PLAN", "absent"], ["cannot read ledger absent"]),
    (["compare", "JOB", "PLAN"], ["JOB is not JSON"]),
    (["compare", "PLAN", "EMPTY"], ["EMPTY holds no ledger.json", "tightfit measure"]),
    (["picture", "timeline", "--model", "tiny-llama", "--seq", "64", "--out", "x.jpg"], ["name it .png or .svg"]),
    (["picture", "timeline", "--model", "lama", "--out", "x.png"], ["lama"]),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=lambda value: " ".join(value)[:60])
def test_mistakes_are_one_sentence(
    arguments: list[str], words: list[str], job_file: Path, plan_file: Path, tmp_path: Path, tightfit: Any
) -> None:
    (tmp_path / "file").write_text("{")
    (tmp_path / "file.json").write_text("{")
    (tmp_path / "empty").mkdir()
    places = {
        "JOB": job_file,
        "PLAN": plan_file,
        "EMPTY": tmp_path / "empty",
        "FILE": tmp_path / "file",
        "FILE.json": tmp_path / "file.json",
    }

    def real(text: str) -> str:
        for name, place in sorted(places.items(), key=lambda item: -len(item[0])):
            text = re.sub(rf"(?<![A-Z]){re.escape(name)}(?![A-Z])", str(place), text)
        return text

    made = tightfit(*map(real, arguments))
    assert made.code == 2
    assert made.err.startswith("tightfit: ")
    assert made.err.count("\n") == 1, made.err
    for word in words:
        assert real(word) in made.err
