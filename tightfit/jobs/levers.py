"""Levers: what one GPU keeps less of, and what that costs. All are exact unless their name says otherwise."""

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
    """Recompute so many layers, evenly spread, instead of every n-th."""
    checkpoint_keep: Literal["nothing", "attention", "matmuls"] = "nothing"
    """What recomputed layers keep beside their input: attention's output, or that and all matrix products."""
    checkpoint_budget_bytes: int | None = Field(default=None, ge=0)
    """Instead of the three above: keep what saves most time in so many bytes of activations, recompute the rest."""
    loss: Literal["fused", "plain"] = "fused"
    """`fused` projects and reads the logits a chunk at a time; `plain` holds all of them."""
    loss_chunk_bytes: int = Field(default=LOSS_CHUNK_BYTES, ge=0)
    """Memory the fused loss may use for the logits of a chunk beside what backward needs anyway."""
    tiles: int = Field(default=1, ge=1)
    """Pieces of the sequence that layers work through one after another; attention sees the whole."""
    offload: Offload = "none"
    """States kept in host memory: the optimizer's (with the master weights), or the weights as well."""
    offload_keep_bytes: int = Field(default=0, ge=0)
    """Of these states, so many bytes stay on the GPU."""
    offload_update: Literal["gpu", "host", "auto"] = "gpu"
    """Who updates offloaded float32 states: the GPU, to the bit as if they had stayed; the host; or who is faster."""
    offload_gradient_bytes: int = Field(default=2**30, ge=0)
    """With updates inside backward, gradients that may wait on the GPU for the link to the host."""
    offload_checkpoints: bool = False
    """Keep the inputs of recomputed layers in host memory until backward needs them."""
    checkpoint_host_bytes: int | None = Field(default=None, ge=0)
    """At most so many bytes of them go there, the others stay on the GPU; None for all but the last."""
    checkpoint_format: Literal["exact", "fp8"] = "exact"
    """How they are stored there; fp8 is lossy."""
    optimizer_states: StateFormat = "auto"
    """Format of Adam's moments: auto is float32 beside masters, else the weights' own; the narrower ones are lossy."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How updated bf16 weights without masters are rounded; `stochastic` keeps small updates, on average."""
    update_in_backward: bool = False
    """Update each weight as soon as its gradient is complete, then free that; clips by an estimate of the norm."""

    matmul: Literal["native", "fp8-tensor", "fp8-row"] = "native"
    """Linear layers' products in the compute dtype, or in fp8 scaled per tensor or per row, which is lossy."""

    cuda_graph: Literal["auto", "on", "off"] = "auto"
    """Launch all kernels of a micro-batch at once, captured from the first ones; `auto` where the host would be slower
    than the card."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if sentence := refused_levers(self):
            raise ValueError(sentence)
        return self
