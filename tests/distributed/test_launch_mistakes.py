"""`tightfit launch` where something is wrong: one sentence, no tracebacks of those that missed the culprit."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.distributed.victim import train_or_die
from tests.train.jobs import SMALL_RUN, checkpoint_files, snapshot, tiny_job
from tightfit.cli.main import main
from tightfit.cli.train import train_as_rank
from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.launch import launcher, stopped
from tightfit.launch.launcher import loopback_store, run_processes
from tightfit.models.resolve import checkpoints_of
from tightfit.train.loop import run_job

pytestmark = pytest.mark.usefixtures("server")
Make = Callable[..., tuple[Job, Path]]


@pytest.fixture
def make(tmp_path: Path, corpus: Path, token_cache: Path) -> Make:
    def made(**changes: Any) -> tuple[Job, Path]:
        fields = SMALL_RUN | {"layout": {"data": 2, "micro_batch": 1}, "device": "cpu", "saving": {"every": 1}}
        job = tiny_job(tmp_path / "run", corpus, token_cache, **(fields | changes))
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json")))
        return job, tmp_path / "job.yaml"

    return made


def launch(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *words: object) -> tuple[Any, str]:
    """Exit code and what was said to stderr."""
    monkeypatch.setattr("sys.argv", ["tightfit", "launch", *map(str, words)])
    with pytest.raises(SystemExit) as stopped_with:
        main()
    return stopped_with.value.code, capfd.readouterr().err


def test_a_mistake_is_one_sentence_and_is_not_repeated(
    make: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Found by all ranks, and by the first alone while the other waits."""
    attempts = []
    real = launcher._attempt
    monkeypatch.setattr(launcher, "_attempt", lambda *given: attempts.append(1) or real(*given))
    job, file = make()
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    for change, words in (("optimizer.betas=[0.9, 0.99]", None), (f"data.train={tmp_path}/latin.txt", "UTF-8")):
        attempts.clear()
        before = snapshot(tmp_path)
        options = ["--resume"] if words is None else []
        code, said = launch(monkeypatch, capfd, file, "--restarts", 2, "-o", change, *options)
        assert code == 2
        assert len(attempts) == 1
        sentences = [line for line in said.splitlines() if line.startswith("tightfit: ")]
        assert len(sentences) == 1, said
        assert (words or "has no checkpoint to resume from") in sentences[0]
        assert "Traceback" not in said
        assert snapshot(tmp_path) == before
    assert not job.output.exists()


def test_restarts_do_not_pass_over_a_run_that_is_there(
    make: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job, file = make()
    run_job(job.model_copy(update={"layout": job.layout.model_copy(update={"data": 1})}), quiet=True)
    before = snapshot(job.output)
    code, said = launch(monkeypatch, capfd, file, "--restarts", 1)
    assert code == 2
    assert "already holds a run; add --resume, --overwrite" in said
    assert snapshot(job.output) == before


def test_an_overwriting_launch_that_is_started_again_begins_anew(make: Make, tmp_path: Path) -> None:
    """A rank dies before the new run has saved anything; the old run, of another seed, must not be gone on with."""
    job, file = make(saving={"every": 2}, steps=4)
    alone = job.layout.model_copy(update={"data": 1})
    run_job(job.model_copy(update={"layout": alone, "seed": 7}), quiet=True)
    fresh = job.model_copy(update={"layout": alone, "output": tmp_path / "fresh"})
    died, before = tmp_path / "died", launcher._identities(job.output)

    def arguments(attempt: int) -> tuple[Any, ...]:
        has_saved = bool(launcher._identities(job.output) - before)
        return "first step", 1, str(died), [str(file), *launcher._start(["--overwrite"], attempt, has_saved=has_saved)]

    assert run_processes(train_or_die, arguments, 2, 1, job.output) is None
    assert died.exists()
    run_job(fresh, quiet=True)
    ours, theirs = (checkpoints_of(run)[-1] for run in (job.output, fresh.output))
    assert checkpoint_files(ours)["config.json"] == checkpoint_files(theirs)["config.json"]
    assert "seed: 0" in (job.output / "job.yaml").read_text()
    assert not (job.output / ".replaced").exists()


def test_a_stopped_rank_is_named_within_seconds(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stopped, "STOPPED_S", 2.0)
    job, file = make(steps=100_000)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"rank 1 was stopped \(SIGSTOP\) for \d s and has been ended, and the other"):
        run_processes(stop_the_second, lambda _: ([str(file)], str(job.output)), 2, 0, job.output)
    assert time.monotonic() - began < 120, "on a machine that does other things too"
    assert checkpoints_of(job.output)


def stop_the_second(arguments: list[str], run: str) -> None:
    """The second rank stops itself once a checkpoint is there."""
    import threading

    def stop() -> None:
        while not checkpoints_of(Path(run)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSTOP)

    if os.environ["RANK"] == "1":
        threading.Thread(target=stop, daemon=True).start()
    train_as_rank(arguments)


def test_the_store_of_a_launch_is_reached_from_this_machine_alone() -> None:
    store = loopback_store()
    store.set("who", "us")
    socket.create_connection(("127.0.0.1", store.port), timeout=5).close()
    others = ["127.0.0.2", *{address[4][0] for address in socket.getaddrinfo(socket.gethostname(), None)}]
    for address in {str(other) for other in others} - {"127.0.0.1", "::1"}:
        with pytest.raises(OSError, match=r"refused|timed out|unreachable|assign"):
            socket.create_connection((address, store.port), timeout=5)
    assert store.get("who") == b"us"
