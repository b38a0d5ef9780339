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
from tightfit.exports.overwriting import refuse_overwriting, says_one_of
from tightfit.exports.skypilot import skypilot_task
from tightfit.exports.training_pods import kubernetes_training, pytorch_job
from tightfit.jobs.engine import EngineName
from tightfit.plan.plan import Plan

PLAN_FILE = "plan.json"
REMEDY = "name another place"
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
    """Write `KIND=FILE`, or everything into the folder `wanted`; returns a line per file: written, or why not.

    Files of an earlier export are replaced, and removed where this plan has none of the kind. Where another file is in
    the way, that is told and nothing is written.
    """
    check_export(wanted)
    files, plan_file, keeps_plan = _files(wanted)
    texts = {path: _text(plan, each, plan_file) for path, each in files.items()}
    older = _older_plan(plan_file) if keeps_plan else None
    older_texts = {} if older is None else {path: _text(older, each, plan_file) for path, each in files.items()}
    for path, text in texts.items():
        if isinstance(text, str):
            ours = [each for each in (text, older_texts.get(path)) if isinstance(each, str)]
            refuse_overwriting(path, ours, REMEDY)
        elif len(files) == 1:
            raise text
    lines = [
        _written(plan, files[path], path, text)
        if isinstance(text, str)
        else _left_out(path, text, older_texts.get(path))
        for path, text in texts.items()
    ]
    if keeps_plan:  # last, so that files which a killed export wrote are of this plan or of the older one
        write_text(plan_file, json.dumps(plan.to_json(), indent=1), remedy="choose another place")
        lines.insert(0, f"wrote {plan_file}")
    return lines


def _files(wanted: str) -> tuple[dict[Path, Export], Path, bool]:
    """The files that are asked for, the file of the plan that they run, and whether that is written too."""
    kind, equals, place = wanted.partition("=")
    if not equals:
        folder = Path(wanted)
        return {folder / each.file: each for each in EXPORTS.values()}, folder / PLAN_FILE, True
    path = Path(place)
    return {path: EXPORTS[kind]}, path.with_name(f"{path.stem}.{PLAN_FILE}"), EXPORTS[kind].runs_plan


def _text(plan: Plan, wanted: Export, plan_file: Path) -> str | UserError:
    """The text of an export, or why the plan has none."""
    try:
        return wanted.text(plan, plan_file)
    except UserError as error:
        return error


def _older_plan(plan_file: Path) -> Plan | None:
    """The plan of an earlier export; None where there was none."""
    if not plan_file.exists():
        return None
    try:
        return Plan.load(plan_file)
    except (UserError, UnicodeDecodeError):
        raise UserError(f"{plan_file} is there already and is not a plan; name another place, or remove it") from None


def _left_out(path: Path, reason: UserError, older: str | UserError | None) -> str:
    """Say why a plan has no such file; one of the earlier plan is removed, as it would contradict this one."""
    if not path.is_file():
        return f"no {path.name}: {reason}"
    if isinstance(older, str) and says_one_of(path, [older], REMEDY):
        path.unlink()
        return f"removed {path}, which was the earlier plan's: {reason}"
    return f"no {path.name}, and the one in {path.parent} is not of this plan: {reason}"


def _written(plan: Plan, wanted: Export, path: Path, text: str) -> str:
    """Write one export; the returned line has the estimate for the engine that runs it, if that is another one."""
    write_text(path, text, remedy="choose another place", executable=wanted.is_script)
    return f"wrote {path}" if wanted.engine is None else f"wrote {path}; {engine_estimate(plan, wanted.engine)}"


def _accelerate_text(plan: Plan) -> str:
    config = yaml.safe_dump(accelerate_config(plan), sort_keys=False)
    return f"# {engine_estimate(plan, 'hf')}\n{config}"


def _json(fields: object) -> str:
    return json.dumps(fields, indent=2) + "\n"
