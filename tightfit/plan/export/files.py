"""Exports as files: all that a plan has in a folder, or one where the user wants it."""

import json
from collections.abc import Callable
from pathlib import Path

import yaml

from tightfit.durable import durable_file
from tightfit.errors import UserError
from tightfit.plan.export.accelerate import accelerate_config
from tightfit.plan.export.deepspeed import deepspeed_config
from tightfit.plan.export.launch import slurm_script, torchrun_line
from tightfit.plan.plan import Plan

PLAN_FILE = "plan.json"
Text = Callable[[Plan], str]
EXPORTS: dict[str, tuple[str, Text]] = {
    "deepspeed": ("deepspeed.json", lambda plan: json.dumps(deepspeed_config(plan), indent=2) + "\n"),
    "accelerate": ("accelerate.yaml", lambda plan: yaml.safe_dump(accelerate_config(plan), sort_keys=False)),
    "torchrun": ("torchrun.sh", lambda plan: f"#!/usr/bin/env bash\n{torchrun_line(plan)}\n"),
    "slurm": ("slurm.sh", slurm_script),
}


def export(plan: Plan, wanted: str) -> list[str]:
    """Write `KIND=FILE`, or everything into the folder `wanted`; returns what was written or why it was not."""
    kind, equals, place = wanted.partition("=")
    if equals:
        if kind not in EXPORTS:
            raise UserError(f"there is no export {kind!r}; write one of {', '.join(EXPORTS)}, or a folder for all")
        return [_write(Path(place), EXPORTS[kind][1](plan))]
    folder = Path(wanted)
    said = [_write(folder / PLAN_FILE, json.dumps(plan.to_json(), indent=1))]
    for name, text in EXPORTS.values():
        try:
            said.append(_write(folder / name, text(plan)))
        except UserError as error:
            said.append(f"no {name}: {error}")
    return said


def _write(path: Path, text: str) -> str:
    try:
        with durable_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another place") from None
    return f"wrote {path}"
