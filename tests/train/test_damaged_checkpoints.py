"""A resume from a damaged checkpoint: which file is missing or damaged, and which checkpoint to take instead."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.jobs import SMALL_RUN, tiny_job
from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.models.resolve import checkpoints_of
from tightfit.train.loop import run_job

CHANGES = SMALL_RUN | {"saving": {"every": 1, "keep": 3, "sharded": False}}


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory, token_cache: Path, corpus: Path) -> Path:
    """A run with checkpoints of steps 1, 2 and 3."""
    job = tiny_job(tmp_path_factory.mktemp("whole") / "run", corpus, token_cache, **(CHANGES | {"steps": 3}))
    return run_job(job, quiet=True).run


@pytest.fixture
def job(three_steps: Path, tmp_path: Path, token_cache: Path, corpus: Path) -> Job:
    """The job of a copy of that run."""
    shutil.copytree(three_steps, tmp_path / "run")
    return tiny_job(tmp_path / "run", corpus, token_cache, **(CHANGES | {"steps": 4}))


def refusal(job: Job, **start: Any) -> str:
    with pytest.raises(UserError) as caught:
        run_job(job, quiet=True, **start)
    return str(caught.value)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"),
    *("training/state.json", "training/state.safetensors"),
)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_damaged_file_is_named_and_the_newest_whole_checkpoint(job: Job, name: str) -> None:
    first, second, third = checkpoints_of(job.output)
    damages: list[Callable[[Path], object]] = [cut, Path.unlink] if name.endswith(".json") else [flip, cut, Path.unlink]
    for damage in damages:
        damage(third / name)
        said = refusal(job, resume=True)
        assert str(third / name) in said
        assert said.endswith("; resume from an older checkpoint with --from step-00000002")
    (second / name).unlink()
    assert refusal(job, resume=True).endswith("with --from step-00000001")
    (first / "config.json").unlink()
    assert refusal(job, resume=True).endswith(
        "there is no other whole checkpoint of the run, so start it anew with --overwrite"
    )


def test_an_older_one_that_is_damaged_names_the_newest(job: Job) -> None:
    cut(job.output / "checkpoints" / "step-00000001" / "model.safetensors")
    said = refusal(job, checkpoint="step-00000001")
    assert said.endswith("resume from a newer checkpoint with --from step-00000003")
    assert run_job(job, checkpoint="step-00000003", quiet=True).step == 4


def test_an_empty_directory_is_no_checkpoint(job: Job) -> None:
    (job.output / "checkpoints" / "step-00000004").mkdir()
    assert [path.name[-1] for path in checkpoints_of(job.output)] == ["1", "2", "3"]
    result = run_job(job, resume=True, quiet=True)
    assert (result.step, result.checkpoint.name) == (4, "step-00000004")
