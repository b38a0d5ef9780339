"""`tightfit doctor` on processes of this machine: what is well, a wrong result, a rank that dies, one that hangs."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from tests.covering import sampled, thorough
from tests.distributed.group import Group
from tests.distributed.training import mesh_of
from tests.hardware.test_calibration import MEASURED
from tests.hardware.test_collective_rates import measured
from tightfit.cli.main import app
from tightfit.errors import UserError
from tightfit.hardware.calibration import CPU, read_calibrations, write_calibration
from tightfit.jobs.layout import Layout
from tightfit.models.presets import preset
from tightfit.prove import collectives, doctor
from tightfit.prove.check_target import CheckTarget, miniature
from tightfit.prove.collectives import wrong_collectives
from tightfit.prove.doctor import Examination, Notebook, examination, run_doctor
from tightfit.prove.equivalence import Verdict, compare
from tightfit.prove.machine_facts import shared_memory, slow_links
from tightfit.prove.splits import ROUTED, Split, splits_that_fit

Make = Callable[[int], Group]
CPU_DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One device has been measured already, so that the doctor does not."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    write_calibration(type(MEASURED)(**{**vars(MEASURED), "device": CPU}))


def two_splits(ranks: int) -> list[Split]:
    return [split for split in splits_that_fit(ranks) if split.name in ("data 2 ZeRO-3", "tensor 2")]


@pytest.mark.usefixtures("server")
def test_a_healthy_machine_is_measured_and_remembered() -> None:
    with patch.object(doctor, "splits_that_fit", two_splits):
        told = CliRunner().invoke(app, ["doctor", "--ranks", "2"])
    assert told.exit_code == 0, told.output
    assert "healthy" in told.output
    assert "2 splits" in told.output
    found = read_calibrations()[CPU]
    assert found.products_tflop_s == MEASURED.products_tflop_s
    assert found.collectives is not None
    assert (found.collectives.ranks, found.collectives.backend) == (2, "gloo")
    assert all(point.us > 0 for point in found.collectives.points)


def dying(device: torch.device, plan: Examination) -> Any:
    """The second rank is killed on its way, when the first has written down what it found."""
    notes = Notebook(Path(plan.folder))
    notes.found("collectives", "fine", "right")
    notes.begin("checking tensor 2")
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hanging(device: torch.device, plan: Examination) -> Any:
    """No rank comes back."""
    time.sleep(60)


def differing(device: torch.device, plan: Examination) -> Any:
    """Every split trains otherwise, and the first one says so."""
    original = compare

    def doubled(target: CheckTarget, *arguments: Any, **options: Any) -> Verdict:
        with patch("tightfit.parallel.tensor.Exchange.leave", lambda self, y, bias: 2 * y):
            return original(target, *arguments, **options)

    with patch.object(doctor, "compare", doubled), patch.object(collectives, "SIZES", {"cpu": (1024, 4096)}):
        return examination(device, plan)


@pytest.mark.usefixtures("server")
def test_a_rank_that_dies_is_named_with_what_it_did() -> None:
    found = run_doctor(2, examine=dying)
    assert not found.healthy
    words = next(each.words for each in found.findings if each.verdict == "wrong")
    assert "process 1 of 2 was ended by SIGKILL" in words
    assert "checking tensor 2" in words
    assert any(each.what == "collectives" and each.verdict == "fine" for each in found.findings)
    assert read_calibrations()[CPU].collectives is None


@pytest.mark.usefixtures("server")
def test_ranks_that_hang_are_ended() -> None:
    found = run_doctor(2, examine=hanging, limit_s=1)
    words = next(each.words for each in found.findings if each.verdict == "wrong")
    assert "not done after 1 s" in words


def test_what_every_rank_was_doing_is_told(tmp_path: Path) -> None:
    for rank, doing in enumerate(["checking tensor 4", "checking data 4", "checking tensor 4"]):
        Notebook(tmp_path, rank).begin(doing)
    words = doctor._what_happened("it took too long", tmp_path, 4)
    assert words == ("it took too long (rank 0, 2 in checking tensor 4; rank 1 in checking data 4; rank 3 in starting)")


@pytest.mark.usefixtures("server")
def test_a_split_that_differs_is_wrong_and_the_exit_code_says_so() -> None:
    splits = [split for split in splits_that_fit(2) if split.name == "tensor 2 whole sequence"]
    found = run_doctor(2, splits=splits, examine=differing)
    assert [each.what for each in found.findings if each.verdict == "wrong"] == ["tensor 2 whole sequence"]
    with patch.object(doctor, "run_doctor", lambda *_, **__: found):
        told = CliRunner().invoke(app, ["doctor", "--ranks", "2"])
    assert told.exit_code == 1
    assert "trains otherwise than one process" in " ".join(told.output.split())


def with_a_fault(name: str) -> list[str]:
    """The second rank leaves `name` with what it had."""
    original = collectives._operation

    def faulty(asked: str, own: torch.Tensor) -> Any:
        run, result = original(asked, own)

        def broken() -> None:
            run()
            if asked == name and dist.get_rank() == 1:
                result[5] += 1

        return broken, result

    with patch.object(collectives, "_operation", faulty):
        return wrong_collectives(CPU_DEVICE)


@pytest.mark.parametrize("name", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"])
def test_a_wrong_result_names_operation_and_rank(group: Make, name: str) -> None:
    assert group(2).run(wrong_collectives, CPU_DEVICE) == [[], []]
    first, second = group(2).run(with_a_fault, name)
    assert first == second
    assert len(first) == 1
    assert first[0].startswith(f"{name} gave rank 1 a wrong result: number 5 is ")


def test_slow_links_are_sentences() -> None:
    rates = measured(gb_s=200.0, latency_us=20.0)
    even = dict.fromkeys([(0, 1), (0, 2), (1, 2)], 150.0)
    assert slow_links(rates, even, expected_bytes_s=240e9) == []
    assert "GPUs 0 and 2 exchange 20.0 GB/s" in slow_links(rates, even | {(0, 2): 20.0}, expected_bytes_s=240e9)[0]
    assert "reaches 200.0 GB/s of 500 expected" in slow_links(rates, even, expected_bytes_s=500e9)[0]
    assert shared_memory(2**33) == []
    assert "--shm-size" in shared_memory(2**26)[0].words


def test_one_rank_is_refused() -> None:
    with pytest.raises(UserError, match="give --ranks to use CPU processes"):
        run_doctor()


def judged(layout: Layout) -> Verdict:
    target = miniature(CheckTarget(preset(ROUTED), layout, passes=2, length=64))
    return compare(target, mesh_of(layout), CPU_DEVICE, steps=1)


PAIRS = [split for split in splits_that_fit(4) if "×" in split.name]
"""In make test those with a ring: the other pairs stand together in cases of test_tensor.py, test_pipeline.py,
test_context.py and test_expert.py, where two steps are compared."""


@sampled(3)
@pytest.mark.parametrize(
    "split",
    [split if "ring" in split.name else thorough(split) for split in PAIRS],
    ids=[split.name for split in PAIRS],
)
def test_every_pair_of_splits_is_one_process(group: Make, split: Split) -> None:
    verdict = group(4).run(compared, split)[0]
    assert verdict.same, verdict.first


def compared(split: Split) -> Verdict:
    return compare(split.target, mesh_of(split.layout), CPU_DEVICE, steps=1)


@pytest.mark.thorough
def test_all_splits_at_once_on_sixteen_ranks(group: Make) -> None:
    """Pipeline × data × context × tensor, with experts over data and context ranks."""
    five = Layout(pipeline=2, data=2, context=2, ring=2, tensor=2, expert=2, zero=1, micro_batch=2)
    sixteen = group(16)
    for layout in (five.model_copy(update={"expert": 1}), five):
        verdict = sixteen.run(judged, layout)[0]
        assert verdict.same, verdict.first
