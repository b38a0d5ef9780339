"""The commands of docs/training.md and its table of starts, run as written on a small job."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.covering import sampled
from tests.train.jobs import SMALL_RUN, tiny_job
from tightfit.cli import main as cli

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
FENCED = PAGE.split("\n```")[1::2]  # what stands between fences, each with its language first
COMMANDS = [line for block in FENCED if block[0] == "\n" for line in block.splitlines() if line.startswith("tightfit ")]
ROWS = re.findall(r"^\| (?:\(nothing\)|`(--[^`]+)`) \| (\w+)[^|]*\| (\w+)", PAGE, flags=re.MULTILINE)


def say(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr("sys.argv", ["tightfit", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


@pytest.fixture
def folder(tmp_path: Path, corpus: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    job = tiny_job(Path("runs/mine"), corpus, token_cache, **{**SMALL_RUN, "saving": {"every": 1}})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commands_run_as_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert len(COMMANDS) >= 4
    for command in sorted(COMMANDS, key=lambda command: "--dry-run" not in command):  # of a run that is not there yet
        assert say(monkeypatch, *shlex.split(command)[1:]) == 0, (command, capfd.readouterr().err)
    assert (folder / "runs" / "mine" / "checkpoints").is_dir()


@sampled(2)
@pytest.mark.parametrize(("options", "without", "with_run"), ROWS, ids=[row[0] or "nothing" for row in ROWS])
def test_the_table_of_starts_is_true(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: str, without: str, with_run: str
) -> None:
    assert len(ROWS) == 5
    given = options.replace("step-00000200", "step-00000001").split()
    assert say(monkeypatch, "train", "job.yaml", *given) == (2 if without == "refused" else 0)
    if without == "refused":
        assert not (folder / "runs").exists()
        assert say(monkeypatch, "train", "job.yaml") == 0
    code = say(monkeypatch, "train", "job.yaml", *given)
    assert code == (2 if with_run == "refused" else 0)
