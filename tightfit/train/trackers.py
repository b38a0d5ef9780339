"""Receivers of metrics besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow, if the job names them.

A tracker gets numbers by step and never fails a run. Each finds its own settings where its users put them (a login,
`WANDB_MODE=offline`, `MLFLOW_TRACKING_URI`); without them Weights & Biases and MLflow write into the run's directory.
A resumed run goes on under the same name.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tightfit.errors import UserError
from tightfit.jobs.job import Job

PACKAGES = {
    "tensorboard": ("tensorboard", "pip install 'tightfit[tensorboard]'"),
    "wandb": ("wandb", "pip install wandb"),
    "mlflow": ("mlflow", "pip install mlflow"),
}


class Tracker(Protocol):
    """A receiver of metrics."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of one step."""

    def close(self) -> None:
        """End the tracked run."""


def require_trackers(job: Job) -> None:
    """Refuse a tracker that the job names and that is not installed."""
    for field, (package, remedy) in PACKAGES.items():
        if getattr(job.logging, field) and importlib.util.find_spec(package) is None:
            raise UserError(f"logging.{field} is true, but it is not installed: {remedy}")


def open_trackers(job: Job, resumed_step: int, say: Callable[[str], None]) -> list[Tracker]:
    """The trackers that `job` names; one that cannot begin (no login, no network) is a warning and left out."""
    makers: dict[str, Callable[[Job, int], Tracker]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
        "mlflow": MLflow,
    }
    made: list[Tracker] = []
    for field, make in makers.items():
        if getattr(job.logging, field):
            try:
                made.append(make(job, resumed_step))
            except Exception as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                say(f"warning: {make.__name__} cannot begin ({reason:.200}); the run goes on without")
    return made


class TensorBoard:
    """Events under the run's tensorboard/."""

    def __init__(self, job: Job, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(job.output / "tensorboard"), purge_step=resumed_step + 1)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write one scalar per number."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of the project `logging.project`, named as the run's directory."""

    def __init__(self, job: Job, resumed_step: int) -> None:
        import wandb

        self._run = wandb.init(
            project=job.logging.project,
            name=job.output.name,
            id=_identity(job.output),
            dir=str(job.output),
            resume="allow",
            config=job.model_dump(mode="json"),
        )

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Log one row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Upload, or leave it for `wandb sync`."""
        self._run.finish()


class MLflow:
    """A run of the experiment `logging.project`, named as the run's directory."""

    def __init__(self, job: Job, resumed_step: int) -> None:
        import mlflow

        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{job.output / 'mlflow.db'}")
        experiment = mlflow.set_experiment(job.logging.project)
        self._client = mlflow.MlflowClient()
        self._id = self._client.create_run(
            experiment.experiment_id, run_name=job.output.name, tags={"tightfit.resumed_step": str(resumed_step)}
        ).info.run_id
        self._client.log_dict(self._id, job.model_dump(mode="json"), "job.json")

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Log one metric per number."""
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=step)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


def _identity(run: Path) -> str:
    """A W&B run id derived from the directory, so that a resumed run continues the same W&B run."""
    from hashlib import sha256

    return sha256(str(run).encode()).hexdigest()[:16]


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The numeric ones of `values`."""
    return {name: value for name, value in values.items() if isinstance(value, int | float)}
