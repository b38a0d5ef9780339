"""A training plan as a SkyPilot task: `sky launch skypilot.yaml --env DATA=… ` finds the machines and runs it.

The plan is mounted as a file. SkyPilot gives every node the addresses of all nodes; the first is the rendezvous. Fields
that the plan leaves open are `envs` of the task without values: `sky` asks for these before it rents anything.
"""

from pathlib import Path
from typing import Any

import yaml

from tightfit.exports import launch
from tightfit.exports.kubernetes import object_name
from tightfit.hardware.accelerator import Accelerator
from tightfit.plan.plan import Plan

SIZED = {("A100", 80), ("V100", 32)}
"""Cards whose name for SkyPilot includes the memory, as the plain name means a smaller one."""
PLAN_PLACE = "~/tightfit/plan.json"
"""Path of the plan on every node; SkyPilot and the shell both expand ~."""


def skypilot_task(plan: Plan, plan_file: Path) -> str:
    """The task as YAML."""
    machine = plan.machine
    task: dict[str, Any] = {
        "name": object_name(f"tightfit-{launch.short_name(plan)}"),
        "num_nodes": machine.nodes,
        "resources": {"accelerators": f"{accelerator_name(machine.accelerator)}:{machine.per_node}"},
        "file_mounts": {PLAN_PLACE: str(plan_file.absolute())},
        "setup": f"{launch.INSTALL}\n",
    }
    if names := launch.open_names(plan):
        task["envs"] = dict.fromkeys(names)
    lines = ["set -euo pipefail", *launch.require_lines(plan)]
    if machine.nodes > 1:
        lines.append('HEAD_NODE=$(echo "$SKYPILOT_NODE_IPS" | sed -n 1p)')
    lines.append(launch.torchrun_command(plan, f"{PLAN_PLACE}{launch.overrides(plan)}"))
    task["run"] = "\n".join(lines) + "\n"
    return f"{launch.comment(plan)}\n" + yaml.dump(task, Dumper=_WithScripts, sort_keys=False)


class _WithScripts(yaml.SafeDumper):
    """Writes multi-line text as a YAML block (|): people read and edit these files."""


def _as_lines(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_WithScripts.add_representer(str, _as_lines)


def accelerator_name(card: Accelerator) -> str:
    """SkyPilot's name of the card."""
    return f"{card.family}-{card.memory_gb}GB" if (card.family, card.memory_gb) in SIZED else card.family
