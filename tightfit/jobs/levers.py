"""Levers: what one GPU keeps less of, and what that costs. All are exact unless their name says otherwise."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tightfit.jobs.section import Section

Offload = Literal["none", "optimizer", "weights"]
StateFormat = Literal["auto", "fp32", "bf16", "8bit", "factored"]
LOSS_CHUNK_BYTES = 256 * 2**20


class Levers(Section):
    checkpoint_every: int = Field(default=0, ge=0)
    """Recompute the activations of every n-th layer in backward: 1 for all layers, 0 for none."""
    loss: Literal["fused", "plain"] = "fused"
    """`fused` projects and reads the logits a chunk at a time; `plain` holds all of them."""
    loss_chunk_bytes: int = Field(default=LOSS_CHUNK_BYTES, ge=0)
    """Memory the fused loss may use for the logits of a chunk beside what backward needs anyway."""
    tiles: int = Field(default=1, ge=1)
    """Pieces of the sequence that the MLPs work through one after another."""
    offload: Offload = "none"
    """States kept in host memory: the optimizer's (with the master weights), or the weights as well."""
    offload_checkpoints: bool = False
    """Keep the inputs of recomputed layers in host memory until backward needs them."""
    optimizer_states: StateFormat = "auto"
    """Format of Adam's moments: auto is float32 beside masters, else the weights' own; the narrower ones are lossy."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How updated bf16 weights without masters are rounded; `stochastic` keeps small updates, on average."""
    update_in_backward: bool = False
    """Update each weight as soon as its gradient is complete, then free that; clips by the norm of the step before."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.offload_checkpoints and not self.checkpoint_every:
            raise ValueError(
                "levers.offload_checkpoints moves checkpoints, but levers.checkpoint_every is 0; set it to 1"
            )
        return self
