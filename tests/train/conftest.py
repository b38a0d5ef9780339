"""A small run, made once, and copies of it for tests that change or break it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.jobs import SMALL_RUN, tiny_job
from tightfit.jobs.job import Job
from tightfit.train.loop import run_job


@pytest.fixture
def make_small(tmp_path: Path, corpus: Path, token_cache: Path) -> Callable[..., Job]:
    def made(name: str = "run", **changes: Any) -> Job:
        return tiny_job(tmp_path / name, corpus, token_cache, **{**SMALL_RUN, **changes})

    return made


@pytest.fixture(scope="session")
def a_small_run(tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Path:
    """Of two steps with a checkpoint after each, made once."""
    saving = {"every": 1, "keep": 3}
    job = tiny_job(tmp_path_factory.mktemp("a") / "run", corpus, token_cache, **{**SMALL_RUN, "saving": saving})
    run_job(job, quiet=True)
    return job.output


@pytest.fixture
def run_copy(a_small_run: Path, tmp_path: Path) -> Path:
    """A copy of it where `make_small()` would run."""
    shutil.copytree(a_small_run, tmp_path / "run")
    return tmp_path / "run"
