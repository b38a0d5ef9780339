"""Which rank is named, whatever order ends are seen in; and what ranks leave behind instead of printing it."""

import itertools
import signal
import time
from pathlib import Path

import pytest

from tightfit.errors import UserError
from tightfit.launch import stopped
from tightfit.launch.endings import Ending, cause, ending_kept, exit_name, read_ending, sentence, stop_signal
from tightfit.launch.launcher import _start
from tightfit.launch.stopped import StoppedRanks

LOST = "RuntimeError: Connection closed by peer"
LATE = "torch.distributed.DistBackendError: Timed out waiting 600000ms for recv operation to complete"
CASES: dict[str, tuple[list[Ending], int]] = {
    "killed from outside, before those that missed it": (
        [Ending(0, 1, failure=LOST, at=1), Ending(1, 1, failure=LOST, at=2), Ending(2, -9), Ending(3, 143)],
        2,
    ),
    "a fault of its own": ([Ending(0, 1, failure=LOST, at=1), Ending(1, -signal.SIGSEGV)], 1),
    "what we kill is no cause": (
        [Ending(0, -9, killed_by_launcher=True), Ending(1, 1, failure="KeyError: 3", at=5)],
        1,
    ),
    "the first error": ([Ending(0, 1, failure=LOST, at=2.0), Ending(1, 1, failure="KeyError: 3", at=1.9)], 1),
    "a refusal, though others failed before it was seen": (
        [Ending(0, 1, failure=LOST, at=1.1), Ending(1, 2, refusal="lower the rate", at=1.0)],
        1,
    ),
    "out of memory": ([Ending(0, 1, failure=LOST, at=1.1), Ending(1, 3)], 1),
    "stopped": ([Ending(0, 1, failure=LOST, at=1), Ending(1, -9, killed_by_launcher=True, stopped_s=20)], 1),
    "silent beside an error that speaks of time": (
        [Ending(0, 1, failure="RuntimeError: runtime of version 12", at=1), Ending(1, -9, killed_by_launcher=True)],
        0,
    ),
    "silent while others gave up": ([Ending(0, 1, failure=LATE, at=1), Ending(1, -9, killed_by_launcher=True)], 1),
    "asked to stop by somebody else": ([Ending(0, 0), Ending(1, -signal.SIGTERM)], 1),
    "an exit code of its own": ([Ending(0, -signal.SIGTERM), Ending(1, 7)], 1),
}


@pytest.mark.parametrize(("endings", "rank"), CASES.values(), ids=CASES.keys())
def test_the_cause_does_not_depend_on_the_order(endings: list[Ending], rank: int) -> None:
    for order in itertools.permutations(endings):
        assert cause(list(order)).rank == rank


def test_a_rank_keeps_how_it_failed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(rank: int, error: BaseException) -> Ending:
        with pytest.raises(SystemExit) as stopped_with, ending_kept(tmp_path, rank):
            raise error
        return read_ending(tmp_path, rank, int(str(stopped_with.value.code)))

    refused, failed = fail(0, UserError("lower the rate")), fail(1, ZeroDivisionError("oops"))
    assert (refused.exit_code, refused.would_repeat, sentence(refused, "")) == (2, True, "lower the rate")
    assert failed.exit_code == 1
    assert not failed.would_repeat
    assert "ZeroDivisionError: oops (traceback above)" in sentence(failed, "nothing is saved")
    assert cause([failed, refused]) == refused
    assert fail(2, KeyboardInterrupt()).exit_code == 130
    assert fail(3, SystemExit(3)).would_repeat
    assert capfd.readouterr() == ("", "")


def test_ranks_that_were_asked_to_stop_have_not_failed() -> None:
    assert stop_signal([Ending(0, 143), Ending(1, 143)]) == signal.SIGTERM
    assert stop_signal([Ending(0, 143), Ending(1, 1)]) is None
    assert stop_signal([Ending(0, 2), Ending(1, 2)]) is None


def test_exit_codes_have_names() -> None:
    assert exit_name(-signal.SIGKILL) == "signal 9 (SIGKILL)"
    assert exit_name(3) == "exit code 3"


def test_a_restart_goes_on_only_from_what_this_launch_has_saved() -> None:
    for start in ([], ["--resume"], ["--overwrite"], ["--from", "step-00000001"]):
        assert _start(start, 0, has_saved=False) == start
        assert _start(start, 1, has_saved=True) == ["--resume"]
    assert _start([], 1, has_saved=False) == ["--resume-auto"]
    assert _start(["--overwrite"], 1, has_saved=False) == ["--overwrite"]


def test_a_stopped_rank_is_found_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 11 is stopped; time is counted in looks, of which none counts for more than a second."""
    clock, states = [0.0], {10: False, 11: True}
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(stopped, "is_stopped", lambda pid: states[pid])
    watch, found = StoppedRanks(), None
    clock[0] += 1000.0  # we were suspended ourselves
    assert watch.look({0: 10, 1: 11}) is None
    for _ in range(30):
        clock[0] += 1.0
        found = found or watch.look({0: 10, 1: 11})
    assert found == 1
    states[10] = True  # all of them: somebody has suspended the job
    assert watch.look({0: 10, 1: 11}) is None
    assert watch.seconds == {}
