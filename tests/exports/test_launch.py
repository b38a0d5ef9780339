"""torchrun lines through torchrun's own parser, Slurm scripts through bash and a list of sbatch's options."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import parse_args
from typer.testing import CliRunner

from tests.plan.questions import planned
from tightfit.cli.main import app
from tightfit.errors import UserError
from tightfit.exports.files import EXPORTS, export
from tightfit.exports.launch import slurm_script, torchrun_command
from tightfit.plan.plan import Plan

SBATCH = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "mem", "exclusive", "output"}


@pytest.fixture(scope="module")
def two_nodes() -> Plan:
    return planned("llama-3.1-8b", "2x8xH100-80GB", 4096, 64, "layout.data=16", "layout.zero=3", host="1TB").plan


def test_torchrun_reads_its_line(two_nodes: Plan) -> None:
    words = shlex.split(torchrun_command(two_nodes, "'my plans/plan.json'", endpoint="head"))
    assert words[0] == "torchrun"
    read = parse_args(words[1:])
    assert (read.nnodes, read.nproc_per_node, read.rdzv_backend) == ("2", "8", "c10d")
    assert read.rdzv_endpoint == "head:29500"
    assert (read.module, read.training_script) == (True, "tightfit")
    assert read.training_script_args == ["train", "my plans/plan.json"]


def test_one_node_and_one_gpu() -> None:
    node = planned("llama-3.1-8b", "8xH100-80GB", 4096, 64).plan
    read = parse_args(shlex.split(torchrun_command(node, "plan.json"))[1:])
    assert (read.standalone, read.nnodes, read.nproc_per_node) == (True, "1", "8")
    alone = planned("llama-3.2-1b", "H100-80GB", 1024, 64).plan
    assert torchrun_command(alone, "plan.json") == "tightfit train plan.json"


def test_slurm_script(two_nodes: Plan, tmp_path: Path) -> None:
    script = tmp_path / "slurm.sh"
    script.write_text(slurm_script(two_nodes, tmp_path / "plan.json"))
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


def put_program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def test_the_slurm_script_runs_what_it_says(two_nodes: Plan, tmp_path: Path) -> None:
    """From another directory and under another name, as sbatch runs it; with an srun that only tells what it was asked,
    and a scontrol that has more to say than a pipe holds."""
    export(two_nodes, str(tmp_path / "all"))
    put_program(tmp_path, "scontrol", "seq -f node%.0f 7 20000")
    put_program(tmp_path, "srun", 'echo "$@"')
    copy = tmp_path / "slurm_script"
    (tmp_path / "all" / "slurm.sh").rename(copy)
    given = {"DATA": "my notes", "OUTPUT": "out", "STEPS": "5", "TOKENIZER": "train"}
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node[7-8]"}
    made = subprocess.run(["bash", copy], check=True, capture_output=True, text=True, env=env | given, cwd="/")
    assert "--rdzv-endpoint=node7:29500 -m tightfit train " in made.stdout
    assert f"{tmp_path}/all/plan.json -o data.train=my notes" in made.stdout
    for name in given:
        others = {each: value for each, value in given.items() if each != name}
        refused = subprocess.run(["bash", copy], check=False, capture_output=True, text=True, env=env | others)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith(f"error: set {name}: ")


def test_the_torchrun_script_trains_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder that was moved, with a file that is named from where the script is called."""
    work = tmp_path / "work here"
    work.mkdir()
    (work / "notes.txt").write_text("a few words of a note, and some more of them\n" * 400)
    plan = planned("nano-llama", "T4", 32, 4).plan
    export(plan, str(tmp_path / "made"))
    (tmp_path / "made").rename(tmp_path / "moved")
    put_program(tmp_path, "tightfit", 'printf "%s\\n" "$@"')
    given = {"DATA": "notes.txt", "OUTPUT": "run", "STEPS": "1", "TOKENIZER": "train"}
    small = {"model.shape.layers": 1, "precision": "fp32", "device": "cpu", "tokenizer.vocab_size": 300}
    words = [word for name, value in small.items() for word in ("-o", f"{name}={value}")]
    made = subprocess.run(
        [tmp_path / "moved" / "torchrun.sh", *words, "-o", f"data.cache={tmp_path}"],
        env=os.environ | given | {"PATH": f"{tmp_path}:/usr/bin:/bin"},
        cwd=work,
        capture_output=True,
        text=True,
        check=True,
    )
    monkeypatch.chdir(work)
    said = CliRunner().invoke(app, made.stdout.splitlines())
    assert said.exit_code == 0, said.output
    assert (work / "run" / "checkpoints" / "step-00000001" / "model.safetensors").is_file()


def test_one_script_has_its_plan_beside_it(two_nodes: Plan, tmp_path: Path) -> None:
    export(two_nodes, f"torchrun={tmp_path / 'go.sh'}")
    assert Plan.load(tmp_path / "go.plan.json") == two_nodes
    assert '"$here"/go.plan.json' in (tmp_path / "go.sh").read_text()


def test_a_plan_of_a_job_file_asks_for_nothing(tmp_path: Path) -> None:
    """Its data is found from every directory, as the job file's was."""
    (tmp_path / "notes.txt").write_text("words\n")
    trained = "tokenizer: {source: train, vocab_size: 500}"
    (tmp_path / "job.yaml").write_text(f"{{model: nano-llama, data: notes.txt, output: run, steps: 3, {trained}}}")
    said = CliRunner().invoke(app, ["plan", f"{tmp_path}/job.yaml", "--on", "T4", "--export", f"{tmp_path}/out"])
    assert said.exit_code == 0, said.output
    assert "exit 2" not in (tmp_path / "out" / "torchrun.sh").read_text()
    plan = Plan.load(tmp_path / "out" / "plan.json")
    assert plan.job["data"]["train"] == [str(tmp_path / "notes.txt")]
    assert plan.workload.spec.vocab_size == 512  # that of the tokenizer to be trained, not the preset's


def test_a_folder_gets_everything_that_the_plan_has(two_nodes: Plan, tmp_path: Path) -> None:
    said = export(two_nodes, str(tmp_path / "all"))
    names = {each.file for each in EXPORTS.values()} | {"plan.json"}
    assert {path.name for path in (tmp_path / "all").iterdir()} == names
    assert len(said) == len(names)
    assert Plan.load(tmp_path / "all" / "plan.json") == two_nodes
    split = planned("llama-3.2-1b", "8xH100-80GB", 2048, 64, "layout.tensor=2").plan
    said = export(split, str(tmp_path / "split"))
    assert sum("data ranks only" in line for line in said) == 3
    ours = ("torchrun", "slurm", "kubernetes", "pytorchjob", "skypilot")
    assert {path.name for path in (tmp_path / "split").iterdir()} == {
        "plan.json",
        *(EXPORTS[kind].file for kind in ours),
    }


def test_only_files_of_an_earlier_export_are_replaced(two_nodes: Plan, tmp_path: Path) -> None:
    longer = planned("llama-3.1-8b", "2x8xH100-80GB", 8192, 64, "layout.data=16", "layout.zero=3", host="1TB").plan
    export(two_nodes, str(tmp_path))
    export(longer, str(tmp_path))
    assert Plan.load(tmp_path / "plan.json") == longer
    edited = tmp_path / "deepspeed.json"
    edited.write_text(edited.read_text().replace("8192", "9000") + "\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=r"deepspeed\.json is there already and says something else; name another"):
        export(two_nodes, str(tmp_path))
    with pytest.raises(UserError, match=r"deepspeed\.json is there already"):
        export(two_nodes, f"deepspeed={edited}")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "go.plan.json").write_text("mine")
    with pytest.raises(UserError, match=r"go\.plan\.json is there already and is not a plan"):
        export(two_nodes, f"torchrun={tmp_path / 'go.sh'}")
    assert not (tmp_path / "go.sh").exists()


def test_files_of_an_earlier_plan_that_the_new_one_has_none_of_are_removed(two_nodes: Plan, tmp_path: Path) -> None:
    """They would contradict the plan beside them; what a user changed or made stays."""
    split = planned("llama-3.1-8b", "2x8xH100-80GB", 4096, 64, "layout.tensor=2", host="1TB").plan
    export(two_nodes, str(tmp_path))
    edited = tmp_path / "accelerate.yaml"
    edited.write_text(edited.read_text() + "# mine\n")
    said = export(split, str(tmp_path))
    assert not (tmp_path / "deepspeed.json").exists()
    assert any(
        line.startswith(f"removed {tmp_path / 'deepspeed.json'}, which was the earlier plan's: ") for line in said
    )
    assert edited.read_text().endswith("# mine\n")
    assert any(line.startswith("no accelerate.yaml, and the one in") and "not of this plan" in line for line in said)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "deepspeed.json").write_text("{}")
    assert not any(line.startswith("removed") for line in export(split, str(tmp_path / "other")))
    assert (tmp_path / "other" / "deepspeed.json").read_text() == "{}"


def test_mistakes_are_one_sentence(two_nodes: Plan, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no export 'megatron'; write one of deepspeed"):
        export(two_nodes, "megatron=x.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        export(two_nodes, str(tmp_path / "file"))
