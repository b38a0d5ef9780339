"""Levers: settings that lower memory on each rank, usually for time. Exact unless a field says that it is lossy."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tightfit.jobs.lever_table import LOSS_CHUNK_BYTES
from tightfit.jobs.rules.refusals import refused_levers
from tightfit.jobs.section import Section

Offload = Literal["none", "optimizer", "weights"]
StateFormat = Literal["auto", "fp32", "bf16", "8bit", "factored"]


class Levers(Section):
    checkpoint_every: int = Field(default=0, ge=0)
    """Recompute the activations of every n-th layer in backward: 1 for all layers, 0 for none."""
    num_checkpoints: int = Field(default=0, ge=0)
    """Recompute this many layers, evenly spread, instead of every n-th."""
    checkpoint_keep: Literal["nothing", "attention", "matmuls"] = "nothing"
    """What recomputed layers keep besides their input: attention's output, or that and all matrix products."""
    checkpoint_budget_bytes: int | None = Field(default=None, ge=0)
    """Instead of the three above: keep the activations that save most time within this many bytes, recompute others."""
    loss: Literal["fused", "plain"] = "fused"
    """`fused` computes logits and their loss a chunk at a time; `plain` holds all logits."""
    loss_chunk_bytes: int = Field(default=LOSS_CHUNK_BYTES, ge=0)
    """Memory that the fused loss may use for a chunk of logits besides what backward needs anyway."""
    tiles: int = Field(default=1, ge=1)
    """Number of pieces of the sequence that layers go through one after another; attention sees the whole sequence."""
    offload: Offload = "none"
    """States kept in host memory: the optimizer's (with the master weights), or the weights as well."""
    offload_keep_bytes: int = Field(default=0, ge=0)
    """Bytes of the offloaded states that stay on the GPU."""
    offload_update: Literal["gpu", "host", "auto"] = "gpu"
    """Where offloaded float32 states are updated: on the GPU, bit for bit as without offload; on the host; or where it
    is faster."""
    offload_gradient_bytes: int = Field(default=2**30, ge=0)
    """With updates in backward, the most bytes of gradients that wait on the GPU for copies over the host link."""
    offload_checkpoints: bool = False
    """Keep the inputs of recomputed layers in host memory until backward needs them."""
    checkpoint_host_bytes: int | None = Field(default=None, ge=0)
    """The most bytes of those inputs in host memory, the others stay on the GPU; None for all but the last layer's."""
    checkpoint_format: Literal["exact", "fp8"] = "exact"
    """Format of those inputs in host memory; fp8 is lossy."""
    optimizer_states: StateFormat = "auto"
    """Format of Adam's moments: auto is float32 beside masters, else the weights' own; the narrower ones are lossy."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How updated bf16 weights without masters are rounded; `stochastic` keeps small updates, on average."""
    update_in_backward: bool = False
    """Update each weight as soon as its gradient is complete, and free the latter; clips by an estimate of the norm."""

    matmul: Literal["native", "fp8-tensor", "fp8-row"] = "native"
    """Linear layers' products in the compute dtype, or in fp8 scaled per tensor or per row, which is lossy."""

    cuda_graph: Literal["auto", "always", "never"] = "auto"
    """Launch a micro-batch's kernels as a CUDA graph, captured in the first ones; `auto` where the host would be slower
    than the card."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if sentence := refused_levers(self):
            raise ValueError(sentence)
        return self
