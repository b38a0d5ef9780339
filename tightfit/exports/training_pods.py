"""A training plan on Kubernetes: a PyTorchJob for Kubeflow's operator, or plain objects for a cluster without it.

One pod per node, with all of its GPUs and torchrun inside. The plan itself is in a ConfigMap of the same file, so that
`kubectl apply -f` needs no other file. Fields that the plan leaves open (data, output, …) are environment variables of
the pods, which exit with a sentence if one is empty. Data and output are on a volume claim named `data`, mounted at
/data: all nodes must see the output in the same place to resume.

Plain objects are an indexed Job, whose other pods find the first by name through a headless Service. The image must
have torch and CUDA; tightfit is installed when a pod starts.
"""

import json
import shlex

from tightfit.exports import launch
from tightfit.exports.kubernetes import RESOURCES, Json, cluster_object, labels_of, manifest_text, object_name
from tightfit.plan.plan import Plan

IMAGE = "pytorch/pytorch"
PLAN_PLACE, DATA_PLACE, CLAIM = "/etc/tightfit", "/data", "data"
MOUNTS: list[Json] = [
    {"name": "plan", "mountPath": PLAN_PLACE, "readOnly": True},
    {"name": CLAIM, "mountPath": DATA_PLACE},
    {"name": "shm", "mountPath": "/dev/shm"},
]


def kubernetes_training(plan: Plan) -> str:
    """ConfigMap, Service and indexed Job as YAML."""
    name = _name(plan)
    pod = _pod(plan, name, head=f"{name}-0.{name}") | {"restartPolicy": "Never", "subdomain": name}
    service = {
        "clusterIP": "None",
        "selector": {"job-name": name},
        "ports": [{"name": "rendezvous", "port": launch.PORT}],
    }
    job = {
        "completions": plan.machine.nodes,
        "parallelism": plan.machine.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"metadata": {"labels": labels_of(name)}, "spec": pod},
    }
    objects = cluster_object("v1", "Service", name, spec=service), cluster_object("batch/v1", "Job", name, spec=job)
    return _text(plan, *objects)


def pytorch_job(plan: Plan) -> str:
    """ConfigMap and PyTorchJob as YAML; the operator tells pods where the master is."""
    name = _name(plan)
    pod = _pod(plan, "pytorch", head="$MASTER_ADDR")  # the operator looks for a container of this name
    role = {"restartPolicy": "Never", "template": {"metadata": {"labels": labels_of(name)}, "spec": pod}}
    roles = {"Master": {"replicas": 1, **role}}
    if plan.machine.nodes > 1:
        roles["Worker"] = {"replicas": plan.machine.nodes - 1, **role}
    spec = {"runPolicy": {"backoffLimit": 0}, "pytorchReplicaSpecs": roles}
    return _text(plan, cluster_object("kubeflow.org/v1", "PyTorchJob", name, spec=spec))


def _name(plan: Plan) -> str:
    return object_name(f"tightfit-{launch.short_name(plan)}")


def _text(plan: Plan, *objects: Json) -> str:
    """The plan as a ConfigMap, and `objects` that run it, after a launch.comment."""
    variables = "".join(f" {name}" for name in launch.open_names(plan))
    head = f"{launch.comment(plan)}\n"
    head += f"# Give values to{variables} under env; paths are below {DATA_PLACE}.\n" if variables else ""
    metadata = {"name": f"{_name(plan)}-plan", "labels": labels_of(_name(plan))}
    data = {"plan.json": json.dumps(plan.to_json(), indent=1)}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    return head + manifest_text([config_map, *objects])


def _pod(plan: Plan, container: str, head: str) -> Json:
    """One node: a container with all of its GPUs, which starts the node's ranks with the rendezvous at `head`."""
    gpus = {RESOURCES.get(plan.machine.accelerator.vendor, "nvidia.com/gpu"): plan.machine.per_node}
    plan_file = shlex.quote(f"{PLAN_PLACE}/plan.json")
    script = [
        "set -euo pipefail",
        *launch.require_lines(plan),
        f"{launch.INSTALL} >&2",
        "exec " + launch.torchrun_command(plan, f"{plan_file}{launch.overrides(plan)}", endpoint=head),
    ]
    trainer = {
        "name": container,
        "image": IMAGE,
        "command": ["bash", "-c", "\n".join(script)],
        "env": [{"name": name, "value": ""} for name in launch.open_names(plan)],
        "resources": {"limits": gpus, "requests": gpus},
        "volumeMounts": MOUNTS,
    }
    volumes = [
        {"name": "plan", "configMap": {"name": f"{_name(plan)}-plan"}},
        {"name": CLAIM, "persistentVolumeClaim": {"claimName": CLAIM}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    return {"containers": [trainer], "volumes": volumes}
