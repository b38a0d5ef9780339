"""Which FSDP2 the formulas are asked about; the installed one is held to its simulation by every test_formulas_*.py."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas import fsdp2
from tightfit.memory.formulas.overheads import DEFAULT, INSTALLED
from tightfit.memory.formulas.training import training_ledger
from tightfit.memory.ledger import Phase
from tightfit.models.presets import preset

PHASES: tuple[Phase, ...] = ("forward", "loss", "backward", "optimizer")
SOONER: dict[str, tuple[str, dict[str, Any], Phase]] = {
    "frees_buffer_before_copy": ("llama-3.1-8b", {"data": 8, "zero": 3}, "forward"),
    "frees_gradients_before_shard": ("llama-3.1-8b", {"data": 2, "zero": 3}, "backward"),
    "adds_one_by_one": ("llama-3.2-1b", {"data": 2, "zero": 1, "pipeline": 2, "micro_batch": 4}, "backward"),
}
"""For every field a model, a layout and the phase in which its last stage has less."""


@pytest.mark.parametrize("release", ["2.11.0", "2.13.0+cpu", "2.14.1"])
def test_older_ones_are_what_tables_were_measured_with(release: str) -> None:
    assert fsdp2.of_torch(release) == fsdp2.OLDEST == DEFAULT.fsdp2


@pytest.mark.parametrize("release", ["2.15.0", "2.15.1+cu132", "2.16.0a0+git1234567", "3.0"])
def test_newer_ones_hold_less(release: str) -> None:
    assert all(fsdp2.of_torch(release))


def test_plans_are_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert INSTALLED.fsdp2 == fsdp2.installed() == fsdp2.of_torch(torch.__version__)

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(fsdp2, "version", missing)
    assert fsdp2.installed.__wrapped__() == fsdp2.OLDEST


@pytest.mark.parametrize("name", fsdp2.Fsdp2._fields)
def test_each_difference_lowers_its_phase_and_raises_none(name: str) -> None:
    model, fields, phase = SOONER[name]
    layout = Layout.model_validate({"micro_batch": 1, **fields})
    micro_batches = 4 * layout.pipeline if layout.pipeline > 1 else 1
    workload = Workload(
        spec=replace(preset(model), layers=4),
        sequence_length=4096,
        global_batch=layout.data * layout.micro_batch * micro_batches,
    )
    newer = replace(DEFAULT, fsdp2=fsdp2.OLDEST._replace(**{name: True}))
    before, after = (
        {each: ledger.allocated_bytes(each, layout.pipeline - 1) for each in PHASES}
        for ledger in (
            training_ledger(workload, layout, Levers(checkpoint_every=1), given) for given in (DEFAULT, newer)
        )
    )
    assert all(after[each] <= before[each] for each in PHASES)
    assert after[phase] < before[phase]
