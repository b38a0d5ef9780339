"""A deployment as a Kubernetes manifest: one pod per copy, and one address for all of them.

A Deployment of vLLM's own image and a Service in front. A pod requests all GPUs of a copy, so a copy must fit on one
machine. Weights in a directory come from a persistent volume claim, mounted at that path; names on a hub are downloaded
by vLLM. The API key comes from a Secret, if it exists. Containers run with no more rights than they need, and a pod
gets requests once it answers /health.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from tightfit.errors import UserError
from tightfit.exports.vllm import MARK, EngineOptions, vllm_arguments
from tightfit.plan.serving.deployment import Deployment

IMAGES: Mapping[str, str] = {"NVIDIA": "vllm/vllm-openai:v0.24.0", "AMD": "vllm/vllm-openai-rocm:v0.24.0"}
RESOURCES: Mapping[str, str] = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu"}
PORT = 8000
LONGEST_NAME = 63
START_MINUTES = 30
DRAIN_SECONDS = 60
CLAIM = "models"
Json = dict[str, Any]


def kubernetes_manifest(deployment: Deployment, options: EngineOptions, *, image: str | None = None) -> str:
    """Deployment and Service as YAML, after a comment that describes the plan."""
    if deployment.spans_nodes:
        raise UserError(
            f"a copy of {deployment.model} takes {deployment.cards} cards, but a pod has those of one machine "
            f"({deployment.machine.per_node}); name larger cards with --on, or use --export vllm"
        )
    name = object_name(options.name)
    inside = replace(options, host="0.0.0.0", port=PORT)
    pod = _pod(deployment, inside, name, image or IMAGES.get(deployment.machine.accelerator.vendor, ""))
    selector = {"app.kubernetes.io/name": name}
    pods = {
        "replicas": deployment.replicas,
        "selector": {"matchLabels": selector},
        "template": {"metadata": {"labels": labels_of(name)}, "spec": pod},
    }
    service = {"selector": selector, "ports": [{"name": "http", "port": options.port, "targetPort": "http"}]}
    objects = (
        cluster_object("apps/v1", "Deployment", name, spec=pods),
        cluster_object("v1", "Service", name, spec=service),
    )
    return f"# {MARK}:\n# {deployment.describe()}\n" + manifest_text(objects)


def manifest_text(objects: Sequence[Json]) -> str:
    """Objects of a cluster as YAML."""
    return "---\n".join(yaml.dump(each, Dumper=_WithoutAliases, sort_keys=False) for each in objects)


class _WithoutAliases(yaml.SafeDumper):
    """Writes repeated values in full, without YAML anchors: people read and edit these files."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def labels_of(name: str) -> Json:
    """Labels by which the pods of `name` are selected, and that name tightfit as their author."""
    return {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "tightfit"}


def cluster_object(version: str, kind: str, name: str, **fields: Json) -> Json:
    """One object of a manifest, labelled."""
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": labels_of(name)}, **fields}


def object_name(name: str) -> str:
    """`name` as Kubernetes allows it: small letters, digits and hyphens, beginning with a letter."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.rstrip("/").rsplit("/", 1)[-1].lower()).strip("-")
    if not plain:
        raise UserError(f"--name is {name!r}, of which no Kubernetes name can be made; give letters or digits")
    if not plain[0].isalpha():
        plain = f"model-{plain}"
    return plain[:LONGEST_NAME].rstrip("-")


def _pod(deployment: Deployment, options: EngineOptions, name: str, image: str) -> Json:
    gpus = {RESOURCES.get(deployment.machine.accelerator.vendor, ""): deployment.cards}
    key = {"name": f"{name}-key"[:LONGEST_NAME], "key": "api-key", "optional": True}
    health = {"httpGet": {"path": "/health", "port": "http"}}
    mounts, volumes = _volumes(options)
    container = {
        "name": "server",
        "image": image,
        "command": ["vllm"],
        "args": vllm_arguments(deployment, options),
        "env": [{"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": key}}],
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": {"limits": gpus, "requests": gpus},
        "startupProbe": health | {"periodSeconds": 10, "failureThreshold": 6 * START_MINUTES},
        "readinessProbe": health | {"periodSeconds": 5},
        "livenessProbe": health | {"periodSeconds": 10, "failureThreshold": 6},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }
    return {
        "terminationGracePeriodSeconds": DRAIN_SECONDS,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": volumes,
    }


def _volumes(options: EngineOptions) -> tuple[list[Json], list[Json]]:
    """Mounts and volumes: shared memory for the ranks of a copy, and the claim with weights that are directories."""
    mounts: list[Json] = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[Json] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    places = [options.weights, *([options.draft] if options.draft else []), *options.adapters.values()]
    directories = sorted({place for place in places if place.startswith("/")})
    for directory in directories:
        sub_path = directory.strip("/")
        mounts.append({"name": CLAIM, "mountPath": directory, "subPath": sub_path, "readOnly": True})
    if directories:
        volumes.append({"name": CLAIM, "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}})
    return mounts, volumes
