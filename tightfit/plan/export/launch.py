"""The commands that start a plan: one torchrun line, or a Slurm script around it."""

import shlex

from tightfit.plan.plan import Plan

PORT = 29500


def torchrun_line(plan: Plan, plan_file: str = "plan.json", endpoint: str = "$HEAD_NODE") -> str:
    """The line to run on every node; across nodes, HEAD_NODE is the name of the first."""
    machine = plan.machine
    if machine.ranks == 1:
        return f"tightfit train {shlex.quote(plan_file)}"
    meeting = f"--rdzv-backend=c10d --rdzv-endpoint={endpoint}:{PORT}" if machine.nodes > 1 else "--standalone"
    return (
        f"torchrun --nnodes={machine.nodes} --nproc-per-node={machine.per_node} {meeting} "
        f"-m tightfit train {shlex.quote(plan_file)}"
    )


def slurm_script(plan: Plan, plan_file: str = "plan.json") -> str:
    """A batch script: one task per node, torchrun inside it."""
    machine = plan.machine
    memory = f"{int(machine.host_bytes / 2**30 * 0.95)}G" if machine.host_bytes else "0"
    name = plan.model.rstrip("/").rsplit("/", 1)[-1]
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={shlex.quote(f'tightfit-{name}')}",
        f"#SBATCH --nodes={machine.nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={machine.per_node}",
        f"#SBATCH --mem={memory}",
        "#SBATCH --exclusive",
        "#SBATCH --output=%x-%j.out",
        "set -euo pipefail",
        'HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',  # head would end the pipe early
        "export HEAD_NODE",
        f"srun {torchrun_line(plan, plan_file)}",
    ]
    return "\n".join(lines) + "\n"
