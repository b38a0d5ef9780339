"""Job files: what is accepted, and the one sentence each mistake gets."""

import os
import re
import threading
from pathlib import Path

import pytest

from tests.covering import sampled
from tests.speed import within_turns
from tightfit.errors import UserError
from tightfit.jobs.common_words import SET_BY
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


@pytest.mark.parametrize(("batch", "data", "found"), [(1, 1, 1), (4, 1, 4), (7, 1, 7), (64, 2, 8), (6, 2, 3)])
def test_a_micro_batch_that_was_not_given_divides_the_batch(batch: int, data: int, found: int) -> None:
    job = parse_job(MINIMAL, "job.yaml", [f"global_batch={batch}", f"layout.data={data}"])
    assert job.layout.micro_batch == found
    assert job.accumulation == batch // data // found
    assert "micro_batch" not in job.layout.model_fields_set, "fitting may still choose"


def test_data_may_be_a_list_of_paths() -> None:
    job = parse_job(MINIMAL, "job.yaml", ["data=[a.txt, b.txt]", "data.sequence_length=8"])
    assert (job.data.train, job.data.sequence_length) == (["a.txt", "b.txt"], 8)


def test_words_of_other_trainers_name_fields_of_a_job() -> None:
    fields = {row.path for row in field_rows()}
    sections = {path.rpartition(".")[0] for path in fields}
    assert set(SET_BY) <= fields | sections
    words = [word for each in SET_BY.values() for word in each]
    assert len(words) == len(set(words))
    assert not set(words) & {path.rpartition(".")[2] for path in fields}, "it is a word of ours"


def test_an_unknown_field_is_told_before_the_one_that_it_may_stand_for() -> None:
    with pytest.raises(UserError, match=r"unknown field dataset \(value 'a.txt'\); data.train sets that here"):
        parse_job("model: tiny-llama\ndataset: a.txt\noutput: runs/x\nsteps: 10\n", "job.yaml")


def test_later_override_wins() -> None:
    assert parse_job(MINIMAL, "job.yaml", ["steps=3", "steps=4"]).steps == 4


def test_job_survives_its_own_dump() -> None:
    import yaml

    job = default_job(["data.held_out=[a.txt]"])
    assert parse_job(yaml.safe_dump(job.model_dump(mode="json")), "dump") == job


MISTAKES = [
    (["optimizer.lrr=3"], ["optimizer.lrr", "3", "did you mean lr"]),
    (["nonsense=1"], ["nonsense", "the fields there are model"]),
    (["batch_size=4"], ["unknown field batch_size (value 4); global_batch sets that here: Rows per optimizer step"]),
    (["optimizer.learning_rate=1"], ["unknown field optimizer.learning_rate", "optimizer.lr sets that here: Peak"]),
    (["lora={r: 16}"], ["unknown field lora", "adapter sets that here: Low-rank matrices"]),
    (["adapter.r=16"], ["unknown field adapter.r", "adapter.rank sets that here"]),
    (["Seq-Len=16"], ["unknown field Seq-Len", "data.sequence_length sets that here: Tokens per"]),
    (["steps=abc"], ["steps", "'abc'", "whole number"]),
    (["output=[1]"], ["output is [1]", "it should be a path"]),
    (["output=''"], ["output is ''", "it should be a path"]),
    (["data.cache=''"], ["data.cache is ''", "it should be a path"]),
    (["data=3"], ["data is 3", "fields of its own"]),
    (["layout=3"], ["layout is 3", "fields of its own"]),
    (["optimizer.betas=3"], ["optimizer.betas is 3", "a list of numbers"]),
    (["logging.tensorboard=often"], ["logging.tensorboard is 'often'", "true or false"]),
    (["steps=0"], ["steps", "0", "greater than or equal to 1"]),
    (["optimizer.lr=-1"], ["optimizer.lr", "-1", "greater than 0"]),
    (["optimizer.lr=.nan"], ["optimizer.lr", "nan", "finite"]),
    (["optimizer.lr=.inf"], ["optimizer.lr", "inf"]),
    (["optimizer.betas=[0.9,1.0]"], ["betas", "1.0", "below 1"]),
    (["epochs=1"], ["steps is 10", "epochs is 1", "exactly one"]),
    (["steps="], ["neither steps nor epochs is given"]),
    (["global_batch=10", "layout.micro_batch=4"], ["global_batch 10", "layout.micro_batch 4"]),
    (["global_batch=3", "layout.data=2"], ["global_batch 3", "layout.data 2"]),
    (["schedule.warmup_steps=11"], ["warmup_steps", "11", "10 steps", "lower it"]),
    (["precision=int3"], ["precision", "'int3'", "'bf16'"]),
    (["data.held_out=0.9"], ["held_out", "0.9"]),
    (["data.train=[]"], ["data.train is [], but it should not be empty"]),
    (["evaluation.stop_early=2"], ["evaluation.stop_early is 2, but evaluation.every is 0", "set evaluation.every"]),
    (["evaluation.stop_early=2", "evaluation.every=1", "data.held_out=0"], ["evaluation.stop_early", "held_out is 0"]),
    (["saving.keep_best=true", "data.held_out=0"], ["saving.keep_best compares held-out losses", "held_out is 0"]),
    (["model.shape.layers=2", "model.weights=pretrained"], ["shape", "pretrained"]),
    (["model.source.x=1"], ["model.source", "no fields"]),
    (["justtext"], ["'justtext'", "path.to.field=value, such as steps=10"]),
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
    assert not re.search("<class|instance of|pydantic|[Ii]nput should", message)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["job.yaml is empty; start with `model: …`"]),
        ("- 1\n", ["holds a list, not fields"]),
        ("some words\n", ["holds text, not fields"]),
        ("a: [1", ["line"]),
        ("steps: 1\nsteps: 2\n", ["steps", "twice"]),
        ("data: x\noutput: y\nsteps: 1\n", ["model", "missing"]),
        ("model: &a [*a]\n", ["line 1", "aliases"]),
        ("? [1, 2]\n: 3\n", ["job"]),
        ("[" * 5000, ["job", "nested too deeply"]),
        ("[" * 20 + "]" * 20, ["list"]),
        ("[" * 21 + "]" * 21, ["nested too deeply"]),
    ],
)
def test_broken_yaml(text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_job(text, "job.yaml")
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def alias_bomb(levels: int) -> str:
    """Nine times nine times … values in a few hundred bytes."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines)


OTHERS = "model: m\ndata: d\noutput: o\n"
COSTLY = {
    "aliases that unfold": (alias_bomb(9), "aliases unfold to more than 50,000 values"),
    "60,000 keys": ("\n".join(f"k{i}: 1" for i in range(60_000)), "more than 50,000 values"),
    "20,000 keys of which none is known": (MINIMAL + "\n".join(f"k{i}: 1" for i in range(20_000)), "unknown field k"),
    "a number of base 60": (f"steps: 1{':59' * 100_000}", "a number of 300,001 characters"),
    "a number of 5,000 digits": (f"steps: {'7' * 5000}", "a number of 5,000 characters"),
    "a hexadecimal of 5,000 digits": (f"steps: 0x{'f' * 5000}", "a number of 5,002 characters"),
    "a long word": (f"{OTHERS}steps: {'x' * 100_000}", "steps is 'xxxx"),
    "a timestamp that is none": ("steps: !!timestamp x", "line 1 is not valid YAML: 'x' is no timestamp"),
    "a boolean that is none": ("steps: !!bool x", "not valid YAML"),
    "an integer that is none": ("steps: !!int ''", "not valid YAML"),
    "a tag of Python": ("steps: !!python/object/apply:os.system [id]", "not valid YAML"),
    "epochs beyond floats": (f"{OTHERS}epochs: 1.0e308", "epochs is '1.0e308'"),
    "steps beyond time": (f"{OTHERS}steps: {10**40}", "steps is 1000"),
    "a null byte in the output": ('model: m\ndata: d\noutput: "a\\0b"\nsteps: 1', "output 'a\\x00b' is not a name"),
    "nobody's home": ("model: m\ndata: d\noutput: ~nosuchuser/x\nsteps: 1", "home directory that does not exist"),
    "nobody's cache": ("model: m\ndata: {train: d, cache: ~nosuchuser}\noutput: o\nsteps: 1", "data.cache"),
    "a name too long": (f"model: m\ndata: d\noutput: {'n' * 5000}\nsteps: 1", "is not a name that a file here"),
    "an escape sequence": (f'{OTHERS}steps: "\\e]0;title\\a"', r"steps is '\x1b]0;title\x07'"),
}


@sampled(3)
@pytest.mark.parametrize(("text", "words"), COSTLY.values(), ids=COSTLY)
def test_no_text_costs_more_than_its_length(text: str, words: str) -> None:
    with within_turns(250), pytest.raises(UserError) as caught:
        parse_job(text, "job.yaml")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2_200


def test_an_endless_file_is_refused_and_a_pipe_is_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="/dev/zero is a character device and not a regular file"):
        load_job(Path("/dev/zero"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(MINIMAL))
    writer.start()
    assert load_job(pipe).steps == 10
    writer.join()


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
    types = {row.path: row.type for row in rows}
    assert types["data.weights"] == "list[float] | None"
    assert types["adapter.bits"] == "one of [2, 4, 8] | None"
    assert types["adapter.targets"] == "one of [all-linear] | list[str]"
    assert not any(word in kind for kind in types.values() for word in ("Annotated", "Optional", "Union", "typing"))
