"""Job files: what is accepted, and the one sentence each mistake gets."""

from pathlib import Path

import pytest

from tightfit.errors import UserError
from tightfit.jobs.fields import field_rows
from tightfit.jobs.load import default_job, load_job, parse_job

MINIMAL = "model: tiny-llama\ndata: notes.txt\noutput: runs/x\nsteps: 10\n"


def test_minimal_job_is_widened_and_defaulted() -> None:
    job = parse_job(MINIMAL, "job.yaml")
    assert job.model.source == "tiny-llama"
    assert job.data.train == ["notes.txt"]
    assert job.accumulation == 1
    assert job.tokenizer.source == "model"


def test_overrides_reach_nested_and_short_form_fields() -> None:
    overrides = ["optimizer.lr=1e-2", "model.weights=random", "data.sequence_length=32", "steps=", "epochs=2"]
    job = parse_job(MINIMAL, "job.yaml", overrides)
    assert (job.optimizer.lr, job.model.weights, job.data.sequence_length) == (0.01, "random", 32)
    assert (job.model.source, job.data.train, job.steps, job.epochs) == ("tiny-llama", ["notes.txt"], None, 2)


def test_later_override_wins() -> None:
    assert parse_job(MINIMAL, "job.yaml", ["steps=3", "steps=4"]).steps == 4


def test_job_survives_its_own_dump() -> None:
    import yaml

    job = default_job(["data.held_out=[a.txt]"])
    assert parse_job(yaml.safe_dump(job.model_dump(mode="json")), "dump") == job


MISTAKES = [
    (["optimizer.lrr=3"], ["optimizer.lrr", "3", "did you mean lr"]),
    (["nonsense=1"], ["nonsense", "the fields there are model"]),
    (["steps=abc"], ["steps", "'abc'", "integer"]),
    (["steps=0"], ["steps", "0", "greater than or equal to 1"]),
    (["optimizer.lr=-1"], ["optimizer.lr", "-1", "greater than 0"]),
    (["optimizer.lr=.nan"], ["optimizer.lr", "nan", "finite"]),
    (["optimizer.lr=.inf"], ["optimizer.lr", "inf"]),
    (["optimizer.betas=[0.9,1.0]"], ["betas", "1.0", "below 1"]),
    (["epochs=1"], ["steps is 10", "epochs is 1", "exactly one"]),
    (["steps="], ["exactly one"]),
    (["global_batch=10", "layout.micro_batch=4"], ["global_batch 10", "layout.micro_batch 4"]),
    (["schedule.warmup_steps=11"], ["warmup_steps", "11", "10 steps"]),
    (["precision=int3"], ["precision", "'int3'", "'bf16'"]),
    (["data.held_out=0.9"], ["held_out", "0.9"]),
    (["data.train=[]"], ["data.train"]),
    (["model.shape.layers=2", "model.weights=pretrained"], ["shape", "pretrained"]),
    (["model.source.x=1"], ["model.source", "no fields"]),
    (["justtext"], ["'justtext'", "path.to.field=value"]),
    (["=3"], ["path.to.field=value"]),
    (["tokenizer=train", "model.weights=pretrained"], ["tokenizer", "pretrained"]),
]


@pytest.mark.parametrize(
    ("overrides", "words"), MISTAKES, ids=lambda value: value[0] if isinstance(value, list) else ""
)
def test_mistakes_get_one_sentence(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_job(MINIMAL, "job.yaml", overrides)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["NoneType"]),
        ("- 1\n", ["list"]),
        ("a: [1", ["line"]),
        ("steps: 1\nsteps: 2\n", ["steps", "twice"]),
        ("data: x\noutput: y\nsteps: 1\n", ["model", "missing"]),
        ("model: &a [*a]\n", ["model"]),
        ("? [1, 2]\n: 3\n", ["job"]),
        ("[" * 5000, ["job"]),
    ],
)
def test_broken_yaml(text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_job(text, "job.yaml")
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b"#" * 1_000_001)
    for path, word in (
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path, "directory"),
        (binary, "UTF-8"),
        (huge, "larger"),
    ):
        with pytest.raises(UserError, match=word):
            load_job(path)


def test_every_field_is_documented() -> None:
    rows = list(field_rows())
    assert len(rows) > 40
    assert [row.path for row in rows if len(row.meaning) < 10] == []
