"""Trackers: what they are told, offline; that they never fail a run; and the real packages where they are installed."""

import importlib.util
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.train import trackers
from tightfit.train.loop import run_job
from tightfit.train.metrics import METRICS_FILE, read_metrics


class Recorded:
    """Stands in for a package: every call to it, by name and arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            info = SimpleNamespace(run_id="r")
            return SimpleNamespace(log=self.log, finish=self.finish, experiment_id="e", info=info)

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, options) for called, args, options in self.calls if called == name]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    record = Recorded()
    packages = {"wandb": {"init": record.init}, "mlflow": {"set_tracking_uri": record.set_tracking_uri}}
    packages["mlflow"] |= {"set_experiment": record.set_experiment, "MlflowClient": lambda: record}
    for name, attributes in packages.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    pretend_installed(monkeypatch, True)
    return record


def pretend_installed(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    """That both packages are, or are not, whatever is true here."""
    found = importlib.util.find_spec

    def spec(name: str, *rest: Any) -> Any:
        return (object() if installed else None) if name in ("wandb", "mlflow") else found(name, *rest)

    monkeypatch.setattr("importlib.util.find_spec", spec)


def test_both_are_told_every_step(make_small: Callable[..., Job], recorded: Recorded) -> None:
    job = make_small(logging={"wandb": True, "mlflow": True, "project": "mine"})
    run_job(job, quiet=True)
    ((_, started),) = recorded.named("init")
    assert (started["project"], started["name"], started["resume"]) == ("mine", "run", "allow")
    rows = read_metrics(job.output / METRICS_FILE)
    steps = [options["step"] for _, options in recorded.named("log")]
    assert steps == [row["step"] for row in rows]
    losses = [args[2] for args, _ in recorded.named("log_metric") if args[1] == "loss"]
    assert losses == [row["loss"] for row in rows if "loss" in row]
    assert len(recorded.named("finish")) == len(recorded.named("set_terminated")) == 1
    run_job(make_small(logging={"wandb": True}, steps=3), resume=True, quiet=True)
    assert recorded.named("init")[1][1]["id"] == started["id"], "a resumed run goes on under its name"


def test_a_tracker_that_fails_is_a_warning(
    make_small: Callable[..., Job], recorded: Recorded, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no network\nat all")

    monkeypatch.setattr(trackers.WeightsAndBiases, "add", fail)
    assert run_job(make_small(logging={"wandb": True}), quiet=False).step == 2
    assert capfd.readouterr().err.count("WeightsAndBiases takes no metrics (no network)") == 1


def test_a_tracker_that_cannot_begin_is_a_warning(
    make_small: Callable[..., Job], recorded: Recorded, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.delattr("mlflow.set_experiment")
    assert run_job(make_small(logging={"mlflow": True}), quiet=False).step == 2
    assert "MLflow cannot begin" in capfd.readouterr().err


def test_one_that_is_not_installed_is_a_sentence_before_anything_is_written(
    make_small: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_installed(monkeypatch, False)
    job = make_small(logging={"mlflow": True})
    with pytest.raises(UserError, match=r"logging.mlflow is true, but it is not installed: pip install mlflow"):
        run_job(job, quiet=True)
    assert not job.output.exists()


@pytest.mark.skipif(find_spec("wandb") is None, reason="pip install wandb")
def test_weights_and_biases_offline(make_small: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    job = make_small(logging={"wandb": True})
    run_job(job, quiet=True)
    assert list((job.output / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.skipif(find_spec("mlflow") is None, reason="pip install mlflow")
def test_mlflow_offline(make_small: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    run_job(make_small(logging={"mlflow": True}), quiet=True)
    (losses,) = (tmp_path / "mlruns").glob("*/*/metrics/loss")
    assert len(losses.read_text().splitlines()) == 2
