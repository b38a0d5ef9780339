"""torchrun lines through torchrun's own parser, Slurm scripts through bash and a list of sbatch's options."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from tests.plan.questions import planned
from tightfit.errors import UserError
from tightfit.plan.export.files import EXPORTS, export
from tightfit.plan.export.launch import slurm_script, torchrun_line
from tightfit.plan.plan import Plan

SBATCH = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "mem", "exclusive", "output"}


@pytest.fixture(scope="module")
def two_nodes() -> Plan:
    return planned("llama-3.1-8b", "2x8xH100-80GB", 4096, 64, "layout.data=16", "layout.zero=3", host="1TB").plan


def test_torchrun_reads_its_line(two_nodes: Plan) -> None:
    words = shlex.split(torchrun_line(two_nodes, "my plans/plan.json", endpoint="head"))
    assert words[0] == "torchrun"
    read = parse_args(words[1:])
    assert (read.nnodes, read.nproc_per_node, read.rdzv_backend) == ("2", "8", "c10d")
    assert read.rdzv_endpoint == "head:29500"
    assert (read.module, read.training_script) == (True, "tightfit")
    assert read.training_script_args == ["train", "my plans/plan.json"]


def test_one_node_and_one_gpu() -> None:
    node = planned("llama-3.1-8b", "8xH100-80GB", 4096, 64).plan
    read = parse_args(shlex.split(torchrun_line(node))[1:])
    assert (read.standalone, read.nnodes, read.nproc_per_node) == (True, "1", "8")
    alone = planned("llama-3.2-1b", "H100-80GB", 1024, 64).plan
    assert torchrun_line(alone) == "tightfit train plan.json"


def test_slurm_script(two_nodes: Plan, tmp_path: Path) -> None:
    script = tmp_path / "slurm.sh"
    script.write_text(slurm_script(two_nodes))
    subprocess.run(["bash", "-n", script], check=True)
    lines = script.read_text().splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[1 : 1 + len(directives)] == directives  # sbatch stops reading them at the first command
    found = [re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(.+))?", line) for line in directives]
    options = {match[1]: match[2] for match in found if match}
    assert len(options) == len(directives)
    assert set(options) == SBATCH
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "1", "8")
    assert 800 < int(options["mem"].removesuffix("G")) < 932
    assert any(line.startswith("srun torchrun --nnodes=2") for line in lines)


def test_the_script_runs_what_it_says(two_nodes: Plan, tmp_path: Path) -> None:
    """With an srun that only tells what it was asked, and a scontrol that has more to say than a pipe holds."""
    script = tmp_path / "slurm.sh"
    script.write_text(slurm_script(two_nodes))
    for name, body in (("scontrol", "seq -f node%.0f 7 20000"), ("srun", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    made = subprocess.run(
        ["bash", script], check=True, capture_output=True, text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node[7-8]"},
    )  # fmt: skip
    assert "--rdzv-endpoint=node7:29500 -m tightfit train plan.json" in made.stdout


def test_a_folder_gets_everything_that_the_plan_has(two_nodes: Plan, tmp_path: Path) -> None:
    said = export(two_nodes, str(tmp_path / "all"))
    names = {name for name, _ in EXPORTS.values()} | {"plan.json"}
    assert {path.name for path in (tmp_path / "all").iterdir()} == names
    assert len(said) == len(names)
    assert Plan.load(tmp_path / "all" / "plan.json") == two_nodes
    split = planned("llama-3.2-1b", "8xH100-80GB", 2048, 64, "layout.tensor=2").plan
    said = export(split, str(tmp_path / "split"))
    assert sum("data ranks only" in line for line in said) == 2
    assert {path.name for path in (tmp_path / "split").iterdir()} == {"plan.json", "torchrun.sh", "slurm.sh"}


def test_mistakes_are_one_sentence(two_nodes: Plan, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no export 'megatron'; write one of deepspeed"):
        export(two_nodes, "megatron=x.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        export(two_nodes, str(tmp_path / "file"))
