"""The scripts that start a plan: torchrun on every node, or a Slurm script around it; and helpers of other exports.

They run unchanged from any directory: the torchrun script finds its plan beside itself; the Slurm script names the plan
by its absolute path, because sbatch runs a copy of the script. Fields that a plan leaves open (such as the data) are
environment variables: a script exits with a sentence that names the first one missing, before anything starts.
"""

import shlex
from pathlib import Path

from tightfit.models.presets import PRESETS
from tightfit.plan.plan import Plan
from tightfit.printable import printable

PORT = 29500
INSTALL = "pip install 'tightfit[train]'"
OPEN_FIELDS = {
    "DATA": ("data.train", "the files to train on"),
    "OUTPUT": ("output", "the directory of the run"),
    "STEPS": ("steps", "the optimizer steps to take"),
    "TOKENIZER": ("tokenizer.source", "a directory with a tokenizer, or `train` to make one from the data"),
}
"""Environment variables of a script, the fields of a job that they fill, and what they are."""


def torchrun_script(plan: Plan, plan_file: Path) -> str:
    """A script for every node, which lies beside `plan_file`."""
    script = [
        *_header(plan),
        'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
        *require_lines(plan),
        *([_required("HEAD_NODE", "the name of the first node")] if plan.machine.nodes > 1 else []),
        torchrun_command(plan, f'"$here"/{shlex.quote(plan_file.name)}{overrides(plan)} "$@"'),
    ]
    return "\n".join(script) + "\n"


def slurm_script(plan: Plan, plan_file: Path) -> str:
    """A batch script: one task per node, torchrun inside it."""
    machine = plan.machine
    memory = f"{int(machine.host_bytes / 2**30 * 0.95)}G" if machine.host_bytes else "0"
    header, *comments_and_settings = _header(plan)
    lines = [
        header,
        f"#SBATCH --job-name={shlex.quote(f'tightfit-{short_name(plan)}')}",
        f"#SBATCH --nodes={machine.nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={machine.per_node}",
        f"#SBATCH --mem={memory}",
        "#SBATCH --exclusive",
        "#SBATCH --output=%x-%j.out",
        *comments_and_settings,
        f"plan={shlex.quote(str(plan_file.absolute()))}",
        *require_lines(plan),
        'HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',  # head would end the pipe early
        "export HEAD_NODE",
        "srun " + torchrun_command(plan, f'"$plan"{overrides(plan)} "$@"'),
    ]
    return "\n".join(lines) + "\n"


def torchrun_command(plan: Plan, arguments: str, endpoint: str = "$HEAD_NODE") -> str:
    """The command that starts a node's ranks, with rendezvous at `endpoint`; plain `tightfit train` for one rank."""
    machine = plan.machine
    if machine.ranks == 1:
        return f"tightfit train {arguments}"
    return f"{torchrun(machine.nodes, machine.per_node, endpoint)} {arguments}"


def torchrun(nodes: int, per_node: int, endpoint: str) -> str:
    """`tightfit train` on `per_node` ranks of each of `nodes`; rendezvous of several at `endpoint`, a name or a
    variable."""
    place = f'"{endpoint}:{PORT}"' if endpoint.startswith("$") else f"{endpoint}:{PORT}"
    meeting = f"--rdzv-backend=c10d --rdzv-endpoint={place}" if nodes > 1 else "--standalone"
    return f"torchrun --nnodes={nodes} --nproc-per-node={per_node} {meeting} -m tightfit train"


def short_name(plan: Plan) -> str:
    """The last part of the model's name or path."""
    return plan.model.rstrip("/").rsplit("/", 1)[-1]


def comment(plan: Plan) -> str:
    """The first comment of every export."""
    return f"# {printable(plan.model)} on {printable(plan.machine.text)}, as tightfit planned it."


def _header(plan: Plan) -> list[str]:
    given = "".join(f" {name}=…" for name in open_names(plan))
    return [
        "#!/usr/bin/env bash",
        f"{comment(plan)}{' Set' * bool(given)}{given}",
        "# Words after the script's name go to `tightfit train`: -o optimizer.lr=1e-4, --resume, …",
        "set -euo pipefail",
    ]


def open_names(plan: Plan) -> list[str]:
    """Environment variables that the script needs, for fields that the plan leaves open."""
    fields = plan.job_fields()
    is_open = {
        "DATA": "train" not in fields["data"],
        "OUTPUT": "output" not in fields,
        "STEPS": not (fields.get("steps") or fields.get("epochs")),
        "TOKENIZER": fields["model"]["source"] in PRESETS and "tokenizer" not in fields,
    }
    return [name for name, asked in is_open.items() if asked]


def require_lines(plan: Plan) -> list[str]:
    """Shell lines that exit with a sentence if a needed variable is not set."""
    return [_required(name, OPEN_FIELDS[name][1]) for name in open_names(plan)]


def _required(name: str, meaning: str) -> str:
    sentence = f"error: set {name}: {meaning}".replace("`", "'")
    return f'if [ -z "${{{name}:-}}" ]; then echo "{sentence}" >&2; exit 2; fi'


def overrides(plan: Plan) -> str:
    """Options of `tightfit train` that pass those variables on."""
    return "".join(f' -o "{OPEN_FIELDS[name][0]}=${name}"' for name in open_names(plan))
