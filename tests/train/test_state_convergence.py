"""Forty steps on the documentation of Python in every format: the loss ends where float32 moments bring it."""

import json
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean
from typing import Any

import pytest

from tests.covering import thorough
from tests.train.jobs import tiny_job
from tightfit.train.loop import run_job
from tightfit.train.metrics import read_metrics

STEPS, LAST = 40, 5
MARGIN = 0.05
"""Nats that it may end higher, of a loss that falls by more than 1.5."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.jsonl"
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in list(topics.values())[:40]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Any:
    """Training losses with given levers; the one without any is made once."""
    folder, known = tmp_path_factory.mktemp("runs"), {}

    def made(**levers: Any) -> list[float]:
        name = "-".join(map(str, levers.values())) or "plain"
        if name not in known:
            data = {"train": [str(text)], "held_out": 0, "sequence_length": 32, "cache": str(folder / "cache")}
            job = tiny_job(
                folder / name,
                text,
                folder,
                data=data,
                steps=STEPS,
                global_batch=8,
                layout={"micro_batch": 8},
                optimizer={"lr": 5e-3},
                schedule={"warmup_steps": 5},
                levers=levers,
                model={"source": "tiny-llama", "shape": {"layers": 2}},
            )
            run_job(job, quiet=True)
            known[name] = [row["loss"] for row in read_metrics(job.output / "metrics.jsonl") if "loss" in row]
        return known[name]

    return made


@pytest.mark.thorough
@pytest.mark.parametrize(
    "levers",
    [
        thorough({"optimizer_states": "bf16"}),
        {"optimizer_states": "8bit"},
        thorough({"optimizer_states": "factored"}),
        thorough({"update_in_backward": True}),
    ],
    ids=str,
)
def test_the_loss_ends_where_float32_states_bring_it(curve: Any, levers: dict[str, Any]) -> None:
    plain, found = curve(), curve(**levers)
    assert len(found) == len(plain) == STEPS
    assert mean(plain[-LAST:]) < plain[0] - 1.5
    assert found != plain
    assert mean(found[-LAST:]) <= mean(plain[-LAST:]) + MARGIN
