"""The memory estimates of DeepSpeed and accelerate, beside ours.

DeepSpeed's estimator counts model states (weights, gradients, optimizer) and one layer's gathered parameters, without
activations, logits or buffers. accelerate's counts one process's weights, gradients and Adam states for a whole model,
without sharding. Both numbers come from the packages' own functions; if one is not installed, the note says so.
"""

import os
from dataclasses import asdict, dataclass
from typing import Any

from tightfit.exports.host_states import host_states
from tightfit.plan.plan import Plan


@dataclass(frozen=True)
class Estimate:
    """What `who` estimates for one GPU and one node's host; None where it gives no number."""

    who: str
    gpu_bytes: int | None
    host_bytes: int | None
    note: str

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def estimates(plan: Plan) -> list[Estimate]:
    """Estimates of tightfit, DeepSpeed and accelerate, in this order."""
    ours = Estimate("tightfit", plan.gpu_peak_bytes, plan.host_peak_bytes, "everything on the card")
    return [ours, _deepspeed(plan), _accelerate(plan)]


def largest_module_params(plan: Plan) -> int:
    """Parameters of the largest leaf of the model, which is what DeepSpeed calls the largest layer."""
    spec = plan.workload.spec
    widest = max(spec.mlp_size, spec.query_size) * spec.hidden_size
    return max(spec.vocabulary_params, widest)


def _deepspeed(plan: Plan) -> Estimate:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
    except ImportError:
        return _absent("DeepSpeed", "pip install --no-build-isolation deepspeed")
    machine, on_host = plan.machine, host_states(plan.levers)
    places = {"num_gpus_per_node": machine.per_node, "num_nodes": machine.nodes, "cpu_offload": on_host.optimizer}
    params = plan.workload.spec.params()
    if plan.layout.zero == 3 or on_host.weights:
        host, gpu, _ = estimate_zero3_model_states_mem_needs(
            params, largest_module_params(plan), cpu_offload_params=on_host.weights, **places
        )
        return Estimate("DeepSpeed", gpu, host, "ZeRO-3: model states and one layer")
    host, gpu = estimate_zero2_model_states_mem_needs(params, **places)
    return Estimate("DeepSpeed", gpu, host, "ZeRO-2: model states; it has no estimate for less")


def _accelerate(plan: Plan) -> Estimate:
    try:
        from accelerate.commands.estimate import estimate_training_usage
    except ImportError:
        return _absent("accelerate", "pip install accelerate")
    kind = "float32" if plan.workload.precision == "fp32" else "float16"
    found = estimate_training_usage(4 * plan.workload.spec.params(), kind)
    return Estimate("accelerate", int(max(found.values())), None, "one process with the whole model; no activations")


def _absent(who: str, command: str) -> Estimate:
    return Estimate(who, None, None, f"not installed: {command}")
