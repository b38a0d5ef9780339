"""Exports as files: all exports of a plan in a folder, or one at a path that the user names."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from tightfit.durable import write_text
from tightfit.errors import UserError
from tightfit.exports.accelerate import accelerate_config
from tightfit.exports.deepspeed import deepspeed_config, trainer_arguments
from tightfit.exports.estimate import engine_estimate
from tightfit.exports.launch import slurm_script, torchrun_script
from tightfit.exports.skypilot import skypilot_task
from tightfit.exports.training_pods import kubernetes_training, pytorch_job
from tightfit.jobs.engine import EngineName
from tightfit.plan.plan import Plan

PLAN_FILE = "plan.json"
Text = Callable[[Plan, Path], str]
"""The text of an export, given the plan and the file it is saved in."""


@dataclass(frozen=True)
class Export:
    """One kind of file that a plan is written as."""

    file: str
    text: Text
    is_script: bool = False
    runs_plan: bool = False
    """Whether it runs a saved plan, which is written beside it."""
    engine: EngineName | None = None
    """The other engine that runs it, whose estimated memory and time are printed with it."""


EXPORTS = {
    "deepspeed": Export("deepspeed.json", lambda plan, _: _json(deepspeed_config(plan)), engine="deepspeed"),
    "trainer": Export("trainer.json", lambda plan, _: _json(trainer_arguments(plan))),
    "accelerate": Export("accelerate.yaml", lambda plan, _: _accelerate_text(plan), engine="hf"),
    "torchrun": Export("torchrun.sh", torchrun_script, is_script=True, runs_plan=True),
    "slurm": Export("slurm.sh", slurm_script, is_script=True, runs_plan=True),
    "kubernetes": Export("kubernetes.yaml", lambda plan, _: kubernetes_training(plan)),
    "pytorchjob": Export("pytorchjob.yaml", lambda plan, _: pytorch_job(plan)),
    "skypilot": Export("skypilot.yaml", skypilot_task, runs_plan=True),
}


def check_export(wanted: str) -> None:
    """Refuse an unknown kind of export, before a plan is searched for or anything is written."""
    kind, equals, _ = wanted.partition("=")
    if equals and kind not in EXPORTS:
        raise UserError(f"there is no export {kind!r}; write one of {', '.join(EXPORTS)}, or a folder for all")


def export(plan: Plan, wanted: str) -> list[str]:
    """Write `KIND=FILE`, or everything into the folder `wanted`; returns a line per file: written, or why not."""
    check_export(wanted)
    kind, equals, place = wanted.partition("=")
    if equals:
        return _export_one(plan, EXPORTS[kind], Path(place))
    folder = Path(wanted)
    plan_file = folder / PLAN_FILE
    lines = [_write(plan_file, json.dumps(plan.to_json(), indent=1))]
    for each in EXPORTS.values():
        try:
            lines.append(_written(plan, each, folder / each.file, plan_file))
        except UserError as error:
            lines.append(f"no {each.file}: {error}")
    return lines


def _export_one(plan: Plan, wanted: Export, path: Path) -> list[str]:
    plan_file = path.with_name(f"{path.stem}.{PLAN_FILE}")
    lines = [_written(plan, wanted, path, plan_file)]
    if wanted.runs_plan:
        lines.append(_write(plan_file, json.dumps(plan.to_json(), indent=1)))
    return lines


def _written(plan: Plan, wanted: Export, path: Path, plan_file: Path) -> str:
    """Write one export; the returned line has the estimate for the engine that runs it, if that is another one."""
    line = _write(path, wanted.text(plan, plan_file), executable=wanted.is_script)
    return line if wanted.engine is None else f"{line}; {engine_estimate(plan, wanted.engine)}"


def _accelerate_text(plan: Plan) -> str:
    config = yaml.safe_dump(accelerate_config(plan), sort_keys=False)
    return f"# {engine_estimate(plan, 'hf')}\n{config}"


def _json(fields: object) -> str:
    return json.dumps(fields, indent=2) + "\n"


def _write(path: Path, text: str, *, executable: bool = False) -> str:
    write_text(path, text, remedy="choose another place", executable=executable)
    return f"wrote {path}"
