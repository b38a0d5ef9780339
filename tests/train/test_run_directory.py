"""A run's directory: what replaces a run loses nothing, one run writes at a time, and side files never fail one."""

import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.train.jobs import ended_run, snapshot
from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.models.resolve import checkpoints_of
from tightfit.report import run as report
from tightfit.train import loop, run_directory
from tightfit.train.checkpoints import directory
from tightfit.train.dry_run import dry_run
from tightfit.train.evaluation import Evaluation
from tightfit.train.loop import run_job
from tightfit.train.run_directory import REPLACED, Start, decide, recover
from tightfit.writer_lock import LOCK_FILE, locked, refuse_if_locked


def test_the_old_run_goes_when_the_new_one_has_a_checkpoint(
    make_small: Callable[..., Job], run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_copy / "checkpoints" / "notes.txt").write_text("mine")
    seen = []
    real = directory.save_checkpoint

    def watched(*given: Any, **named: Any) -> Any:
        seen.append(sorted(path.name for path in (run_copy / REPLACED / "checkpoints").glob("step-*")))
        return real(*given, **named)

    monkeypatch.setattr(loop, "save_checkpoint", watched)
    result = run_job(make_small(seed=5, saving={"every": 1, "keep": 1}), overwrite=True, quiet=True)
    assert seen == [["step-00000001", "step-00000002"], []]
    assert [path.name for path in checkpoints_of(run_copy)] == [result.checkpoint.name]
    assert {path.name for path in run_copy.iterdir()} == {"job.yaml", "metrics.jsonl", "checkpoints"}
    assert (run_copy / "checkpoints" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("when", ["train_step", "save_checkpoint"])
def test_the_old_run_comes_back_when_the_new_one_fails_before_that(
    make_small: Callable[..., Job], run_copy: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    before = snapshot(run_copy)

    def fail(*_: object, **__: object) -> None:
        assert (run_copy / REPLACED).is_dir()
        raise RuntimeError("in the middle")

    monkeypatch.setattr(loop, when, fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        run_job(make_small(seed=5), overwrite=True, quiet=True)
    assert snapshot(run_copy) == before


def test_a_kill_at_any_rename_loses_no_checkpoint(run_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving aside and back, cut short after any number of renames, is taken back by the next start."""
    before, real = snapshot(run_copy), os.rename

    def cut_short(action: Callable[[Path], None], limit: int) -> None:
        done: list[int] = []

        def rename(source: Any, target: Any) -> None:
            if len(done) == limit:
                raise KeyboardInterrupt
            done.append(1)
            real(source, target)

        monkeypatch.setattr(os, "rename", rename)
        with suppress(KeyboardInterrupt):
            action(run_copy)
        monkeypatch.setattr(os, "rename", real)

    for limit in range(6):
        cut_short(run_directory._move_aside, limit)
        recover(run_copy)
        assert snapshot(run_copy) == before, f"aside, {limit}"
        run_directory._move_aside(run_copy)
        cut_short(run_directory._give_back, limit)
        recover(run_copy)
        assert snapshot(run_copy) == before, f"back, {limit}"


def test_a_new_run_that_fails_at_once_leaves_nothing(
    make_small: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("at once")

    monkeypatch.setattr(loop, "train_step", fail)
    with pytest.raises(RuntimeError):
        run_job(make_small("deep/er/run"), quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_what_is_left_of_a_run_is_not_taken_without_asking(make_small: Callable[..., Job], run_copy: Path) -> None:
    shutil.rmtree(run_copy / "checkpoints")
    before = snapshot(run_copy)
    with pytest.raises(UserError, match=r"holds job\.yaml, metrics\.jsonl of a run without a checkpoint"):
        run_job(make_small(), quiet=True)
    assert snapshot(run_copy) == before
    assert run_job(make_small(), overwrite=True, quiet=True).step == 2


def test_a_directory_takes_one_run_at_a_time(make_small: Callable[..., Job], tmp_path: Path) -> None:
    """Six at once: one trains, the others are told who does."""
    jobs = [make_small(seed=seed) for seed in range(6)]
    sentences: list[str] = []
    ready = threading.Barrier(len(jobs))

    def attempt(job: Job) -> None:
        ready.wait()
        try:
            with run_directory.opened(job, decide(job.output, Start()), Start()):
                sentences.append("began")
                while len(sentences) < len(jobs):
                    time.sleep(0.01)
        except UserError as error:
            sentences.append(str(error))

    threads = [threading.Thread(target=attempt, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sentences.count("began") == 1
    holder = f"is being written by process {os.getpid()} on "
    assert sum(holder in sentence for sentence in sentences) == len(jobs) - 1, sentences


def test_a_run_that_begins_while_another_looks_is_the_reason(
    make_small: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_small()
    asked = refuse_if_locked
    with run_directory.opened(job, decide(job.output, Start()), Start()):
        turns = iter((lambda output: None, asked))  # the first time nobody was there yet
        monkeypatch.setattr(run_directory, "refuse_if_locked", lambda output: next(turns)(output))
        with pytest.raises(UserError, match="is being written by process"):
            decide(job.output, Start())


def test_a_second_run_is_told_of_the_first_before_it_does_anything(
    make_small: Callable[..., Job], run_copy: Path
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_copy)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    before = snapshot(run_copy)
    for options in ({"resume": True}, {"overwrite": True}, {"resume": "auto"}):
        with pytest.raises(UserError, match=rf"being written by process {holder.pid} on \S+ since 20\d\d-"):
            run_job(make_small(steps=4), quiet=True, **options)
    assert snapshot(run_copy) == before
    holder.kill()
    holder.wait()
    assert (run_copy / LOCK_FILE).exists(), "as a kill leaves it"
    assert run_job(make_small(steps=3), resume=True, quiet=True).step == 3
    assert not (run_copy / LOCK_FILE).exists()


HOLD = """
import sys; from pathlib import Path; from tightfit.writer_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True); sys.stdin.read()
"""


def test_a_file_system_without_locks_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    with locked(tmp_path), locked(tmp_path):
        pass


def test_side_files_never_fail_a_run(
    make_small: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rows of metrics and the picture meet a full disk; checkpoints do not."""
    job, real, writes = make_small(steps=6), os.write, []

    def full(descriptor: int, data: bytes) -> int:
        if b'"step"' not in data:
            return real(descriptor, data)
        writes.append(data)
        if 3 <= len(writes) <= 5:
            real(descriptor, data[:10])
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    result = run_job(job)
    assert result.step == 6
    told = capfd.readouterr().err
    assert told.count("cannot write") == 1
    assert "metrics.jsonl: No space left on device; the run goes on without" in " ".join(told.split())
    lines = (job.output / "metrics.jsonl").read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines), "no row is cut short"
    assert len(lines) == len(writes) - 3


def test_a_picture_that_cannot_be_drawn_is_a_warning(
    run_copy: Path, make_small: Callable[..., Job], capfd: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    result = ended_run(run_copy)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        report.print_result(result, make_small(), as_json=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    shown = capfd.readouterr()
    assert "cannot write" in shown.err
    assert "loss.png" in shown.err
    assert "steps" in shown.out
    assert not [path for path in run_copy.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("below", ["", "checkpoints/step-00000002"])
def test_a_run_does_not_replace_what_it_is_made_of(make_small: Callable[..., Job], run_copy: Path, below: str) -> None:
    """Adapters would lose their model, and a teacher would not be there when the run is resumed."""
    source, before = str(run_copy / below), snapshot(run_copy)
    own = {"source": source, "shape": {}}
    changes: list[dict[str, Any]] = [
        {"model": own, "tokenizer": {"source": "model"}},
        {"model": own, "tokenizer": {"source": "model"}, "adapter": {"rank": 2}},
        {"distill": {"teacher": source}},
        {"tokenizer": {"source": source}},
    ]
    for change in changes:
        for run in (run_job, dry_run):
            with pytest.raises(UserError, match=r"a run that this one would replace .*; choose another output"):
                run(make_small(**change), overwrite=True, quiet=True)
    assert snapshot(run_copy) == before


def test_a_run_is_not_begun_among_the_checkpoints_of_another(make_small: Callable[..., Job], run_copy: Path) -> None:
    inside = make_small().model_copy(update={"output": run_copy / "checkpoints" / "step-00000002"})
    for run in (run_job, dry_run):
        with pytest.raises(UserError, match=r"is among the checkpoints of the run .*; choose another output"):
            run(inside, quiet=True)
    beside = make_small().model_copy(update={"output": run_copy / "beside"})
    assert run_job(beside, stop_after=1, quiet=True).step == 1


def test_leftovers_of_a_kill_are_swept_by_the_next_start(make_small: Callable[..., Job], run_copy: Path) -> None:
    for name in (".partial-job.yaml-1", ".discarded-checkpoints-2", "checkpoints/.partial-step-00000003-3"):
        (run_copy / name).mkdir()
    run_job(make_small(steps=3), resume=True, quiet=True)
    assert not list(run_copy.rglob(".*"))


def test_the_best_checkpoint_stays_and_a_plateau_ends_the_run(
    make_small: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([5.0, 4.0, 3.0, 3.5, 3.4, 9.0, 9.0])
    monkeypatch.setattr(loop, "evaluate", lambda *_: Evaluation(next(losses), 10))
    job = make_small(
        steps=50, saving={"every": 1, "keep": 1, "keep_best": True}, evaluation={"every": 1, "stop_early": 2}
    )
    result = run_job(job, stop_after=3, quiet=True)
    assert not result.stopped_early
    result = run_job(job, resume=True, quiet=True)
    assert (result.step, result.stopped_early) == (4, True)
    assert [path.name for path in checkpoints_of(job.output)] == ["step-00000002", "step-00000004"]
