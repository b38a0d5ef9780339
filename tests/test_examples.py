"""Every file in examples/ runs, on the smallest model that shows what it shows."""

import math
import runpy
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.covering import sampled
from tests.few_dots import few_dots
from tightfit.cli.main import app
from tightfit.models.resolve import checkpoints_of

__all__ = ["few_dots"]

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ("-o", "model.source=tiny-llama", "-o", "precision=fp32", "-o", "device=cpu")
FIRST = ("-o", "evaluation.max_rows=1", *SMALL)


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder, and another directory to be in."""
    copy = tmp_path / "examples"
    shutil.copytree(EXAMPLES, copy, ignore=shutil.ignore_patterns("runs", "rag", "exported*"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return copy


def tightfit(*words: str) -> str:
    made = CliRunner().invoke(app, list(words))
    assert made.exit_code == 0, made.output
    return made.output


@sampled(2)
@pytest.mark.parametrize(
    ("name", "steps", "changes"),
    [
        ("pretrain.yaml", 6, ("-o", "schedule.warmup_steps=1", "-o", "evaluation.every=2", "-o", "saving.every=2")),
        ("sft.yaml", 2, ("-o", "epochs=null")),
        ("long_rows.yaml", 2, ("-o", "data.sequence_length=256", "-o", "model.shape.max_positions=512")),
        ("8b_in_24gb.yaml", 2, ("-o", "data.sequence_length=128", "-o", "tokenizer.vocab_size=300")),
    ],
)
def test_a_job_file_trains(name: str, steps: int, changes: tuple[str, ...], examples: Path, token_cache: Path) -> None:
    output = examples.parent / "run"
    places = ("-o", f"output={output}", "-o", f"data.cache={token_cache}", "-o", f"steps={steps}")
    tightfit("train", str(examples / name), *places, *FIRST, *changes)
    assert checkpoints_of(output)[-1].name == f"step-{steps:08}"


def test_several_ranks_train(examples: Path, token_cache: Path, server: None) -> None:
    output = examples.parent / "run"
    places = ("-o", f"output={output}", "-o", f"data.cache={token_cache}", "-o", "steps=1")
    tightfit("launch", str(examples / "several_gpus.yaml"), *places, *FIRST)
    assert (checkpoints_of(output)[-1] / "sharded").is_dir()


def commands(script: Path, arguments: list[str]) -> list[list[str]]:
    """The lines of a script that call tightfit, with its own arguments in their place."""
    lines = [shlex.split(line) for line in script.read_text().splitlines() if line.startswith("tightfit ")]
    return [[word for each in line[1:] for word in (arguments if each == "$@" else [each])] for line in lines]


@pytest.mark.parametrize("name", ["resume.sh", "export.sh"])
def test_a_script_runs_line_by_line(
    name: str, examples: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(examples)  # as the script does first
    small = [*FIRST, "-o", f"data.cache={token_cache}", "-o", "data.sequence_length=32", "-o", "evaluation.prompts=[]"]
    small += ["-o", "global_batch=2", "-o", "layout.micro_batch=2"]
    for command in commands(examples / name, small):
        tightfit(*command)
    if name == "resume.sh":
        assert checkpoints_of(examples / "runs" / "resumed")[-1].name == "step-00000060"
    else:
        assert (examples / "exported.gguf").is_file()
        assert (examples / "exported" / "model.safetensors").is_file()


@sampled(2)
@pytest.mark.parametrize("name", ["hf_trainer", "hf_peft", "hf_trl"])
def test_a_hugging_face_script_trains(name: str) -> None:
    example: dict[str, Any] = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    assert math.isfinite(example["main"](None, 1))


def test_the_list_of_examples_is_whole() -> None:
    page = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        if path.suffix in (".yaml", ".sh", ".py") and not path.name.startswith("_"):
            assert f"]({path.name})" in page
    assert "](rag/README.md)" in page
