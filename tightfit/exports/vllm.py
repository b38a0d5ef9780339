"""A deployment as a vLLM command, for more traffic than one machine can serve.

The options are those of vLLM 0.24. Copies on one machine are its data-parallel ranks; on several machines the script
runs on each, behind the user's own load balancer. A copy that spans machines needs a Ray cluster, which the script's
comments say how to make. The key that clients send is read from the environment and is never in the file.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from tightfit.errors import UserError
from tightfit.memory.formulas.serving import PREFILL_TOKENS
from tightfit.plan.serving.deployment import SHARE, Deployment

MARK = "Written by tightfit from its plan"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512, 1024)
"""LoRA ranks that vLLM supports."""
NO_ADAPTERS: Mapping[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of a server besides those that follow from the deployment."""

    weights: str
    """Weights that vLLM loads: a directory's path on the server, or a name on a hub."""
    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    draft: str | None = None
    lookup: bool = False
    guesses: int = 4
    prefix_cache: bool = True
    adapters: Mapping[str, str] = field(default_factory=lambda: NO_ADAPTERS)
    """LoRA adapters by the name clients ask for."""
    largest_rank: int = 16


def vllm_arguments(deployment: Deployment, options: EngineOptions, *, replicas: int = 1) -> list[str]:
    """The arguments of `vllm`, for `replicas` copies in one process tree."""
    _refuse_unknown(deployment)
    step_tokens = max(PREFILL_TOKENS, deployment.requests)
    arguments = ["serve", options.weights, "--served-model-name", options.name]
    arguments += ["--host", options.host, "--port", str(options.port)]
    arguments += ["--dtype", deployment.dtype, "--max-model-len", str(deployment.length)]
    arguments += ["--max-num-seqs", str(deployment.requests), "--max-num-batched-tokens", str(step_tokens)]
    arguments += ["--gpu-memory-utilization", str(SHARE)]
    for flag, count in (
        ("--tensor-parallel-size", deployment.tensor),
        ("--pipeline-parallel-size", deployment.pipeline),
        ("--data-parallel-size", replicas),
    ):
        arguments += [flag, str(count)] if count > 1 else []
    if deployment.spans_nodes:
        arguments += ["--distributed-executor-backend", "ray"]
    arguments += [] if options.prefix_cache else ["--no-enable-prefix-caching"]
    arguments += ["--kv-cache-dtype", "fp8"] if deployment.cache == "fp8" else []
    return [*arguments, *_guessing(options), *_adapters(options)]


def vllm_script(deployment: Deployment, options: EngineOptions) -> str:
    """A script that starts the server on one machine (on the first of those a copy spans)."""
    per_node = max(1, deployment.machine.per_node // deployment.cards)
    replicas = 1 if deployment.spans_nodes else min(deployment.replicas, per_node)
    words = [shlex.quote(word) for word in ("vllm", *vllm_arguments(deployment, options, replicas=replicas))]
    lines = ["#!/usr/bin/env bash", f"# {MARK}:", f"# {deployment.describe()}"]
    lines += [f"# {note}" for note in _notes(deployment, replicas)]
    lines += ["set -euo pipefail", "exec " + " ".join(words)]
    return "\n".join(lines) + "\n"


def _notes(deployment: Deployment, replicas: int) -> list[str]:
    notes = ["Set VLLM_API_KEY for a key that clients have to send."]
    if deployment.spans_nodes:
        nodes = deployment.cards // deployment.machine.per_node
        notes.append(f"A copy spans {nodes} machines: first `ray start --head` on this one, and")
        notes.append("`ray start --address=THIS_MACHINE:6379` on the others.")
    elif deployment.replicas > replicas:
        machines = -(-deployment.replicas // replicas)
        notes.append(f"Run it on each of {machines} machines, behind a load balancer.")
    return notes


def _refuse_unknown(deployment: Deployment) -> None:
    vendor = deployment.machine.accelerator.vendor
    if vendor not in ("NVIDIA", "AMD"):
        raise UserError(f"--on is {deployment.machine.text}, but vLLM serves on NVIDIA and AMD cards; name such cards")
    if deployment.cache == "int8":
        raise UserError(f"--cache-format is {deployment.cache}, which vLLM does not have; use model or fp8")


def _guessing(options: EngineOptions) -> list[str]:
    """Speculative decoding, as vLLM's JSON option."""
    if options.draft is not None:
        config: dict[str, object] = {"model": options.draft, "num_speculative_tokens": options.guesses}
    elif options.lookup:
        config = {"method": "ngram", "num_speculative_tokens": options.guesses, "prompt_lookup_max": 4}
    else:
        return []
    return ["--speculative-config", json.dumps(config)]


def _adapters(options: EngineOptions) -> list[str]:
    if not options.adapters:
        return []
    modules = [f"{name}={path}" for name, path in options.adapters.items()]
    rank = next(size for size in RANKS if size >= options.largest_rank)
    return ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", *modules]
