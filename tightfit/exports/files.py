"""Exports as files: all exports of a plan in a folder, or one at a path that the user names."""

import json
from collections.abc import Callable
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
EXPORTS: dict[str, tuple[str, Text]] = {
    "deepspeed": ("deepspeed.json", lambda plan, _: _json(deepspeed_config(plan))),
    "trainer": ("trainer.json", lambda plan, _: _json(trainer_arguments(plan))),
    "accelerate": ("accelerate.yaml", lambda plan, _: _accelerate_text(plan)),
    "torchrun": ("torchrun.sh", torchrun_script),
    "slurm": ("slurm.sh", slurm_script),
    "kubernetes": ("kubernetes.yaml", lambda plan, _: kubernetes_training(plan)),
    "pytorchjob": ("pytorchjob.yaml", lambda plan, _: pytorch_job(plan)),
    "skypilot": ("skypilot.yaml", skypilot_task),
}
SCRIPTS = ("torchrun", "slurm")
NEEDS_PLAN = (*SCRIPTS, "skypilot")
"""Exports that run a saved plan, which is written beside them."""
ENGINE_OF: dict[str, EngineName] = {"deepspeed": "deepspeed", "accelerate": "hf"}
"""Exports that another engine runs, whose estimated memory and time are printed with them."""


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
        return _export_one(plan, kind, Path(place))
    folder = Path(wanted)
    plan_file = folder / PLAN_FILE
    lines = [_write(plan_file, json.dumps(plan.to_json(), indent=1))]
    for kind, (name, _) in EXPORTS.items():
        try:
            lines.append(_written(plan, kind, folder / name, plan_file))
        except UserError as error:
            lines.append(f"no {name}: {error}")
    return lines


def _export_one(plan: Plan, kind: str, path: Path) -> list[str]:
    plan_file = path.with_name(f"{path.stem}.{PLAN_FILE}")
    lines = [_written(plan, kind, path, plan_file)]
    if kind in NEEDS_PLAN:
        lines.append(_write(plan_file, json.dumps(plan.to_json(), indent=1)))
    return lines


def _written(plan: Plan, kind: str, path: Path, plan_file: Path) -> str:
    """Write one export; the returned line has the estimate for the engine that runs it, if that is another one."""
    line = _write(path, EXPORTS[kind][1](plan, plan_file), executable=kind in SCRIPTS)
    return f"{line}; {engine_estimate(plan, ENGINE_OF[kind])}" if kind in ENGINE_OF else line


def _accelerate_text(plan: Plan) -> str:
    config = yaml.safe_dump(accelerate_config(plan), sort_keys=False)
    return f"# {engine_estimate(plan, ENGINE_OF['accelerate'])}\n{config}"


def _json(fields: object) -> str:
    return json.dumps(fields, indent=2) + "\n"


def _write(path: Path, text: str, *, executable: bool = False) -> str:
    write_text(path, text, remedy="choose another place", executable=executable)
    return f"wrote {path}"
