"""A training plan as a SkyPilot task: `sky launch skypilot.yaml --env DATA=… ` finds the machines and runs it.

The plan travels as a file beside the task. SkyPilot tells every node the addresses of all; the first is where they
meet. Variables that the plan leaves open are `envs` of the task without values: `sky` asks for these before it rents
anything.
"""

from pathlib import Path
from typing import Any

import yaml

from tightfit.hardware.accelerator import Accelerator
from tightfit.plan.export import launch
from tightfit.plan.export.kubernetes import object_name
from tightfit.plan.plan import Plan

SIZED = {("A100", 80), ("V100", 32)}
"""Cards that SkyPilot names with their memory, as the name alone means a smaller one."""
PLAN_PLACE = "~/tightfit/plan.json"
"""On every node; SkyPilot and the shell both put the home directory in the place of ~."""


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
    lines = ["set -euo pipefail", *launch.asked_lines(plan)]
    if machine.nodes > 1:
        lines.append('HEAD_NODE=$(echo "$SKYPILOT_NODE_IPS" | sed -n 1p)')
    lines.append(launch.torchrun_command(plan, f"{PLAN_PLACE}{launch.overrides(plan)}"))
    task["run"] = "\n".join(lines) + "\n"
    return f"{launch.comment(plan)}\n" + yaml.dump(task, Dumper=_WithScripts, sort_keys=False)


class _WithScripts(yaml.SafeDumper):
    """Writes text of several lines as lines: people read and edit these files."""


def _as_lines(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_WithScripts.add_representer(str, _as_lines)


def accelerator_name(card: Accelerator) -> str:
    """What SkyPilot calls the card."""
    return f"{card.family}-{card.memory_gb}GB" if (card.family, card.memory_gb) in SIZED else card.family
