"""Launches: what the host needs to launch a micro-batch's kernels and the update's (hardware/launches.py).

Levers are taken to add up: what checkpointing adds to a layer's launches is paid by layers that are computed again,
what others add (`ADDED`) by all. Layers in tiles are a layer of their own (tiles.py).
Layers of other families launch more: norms of queries and keys and after blocks are counted, and inside backward an
update for each tensor. Routed layers launch as many as others.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

from tightfit.hardware.launches import (
    BIAS,
    CHUNK_WEIGHTS,
    FURTHER_CHUNK_MS,
    LAYER,
    NORM,
    REST,
    TENSOR_UPDATE_MS,
    UPDATE_MS,
    UPDATE_REST_MS,
    USUAL_TENSORS,
    Launch,
)
from tightfit.jobs.levers import Levers
from tightfit.jobs.state_format import is_torch_adamw, state_format
from tightfit.models.spec import ModelSpec
from tightfit.plan.seconds.fp8 import fp8_launch
from tightfit.plan.seconds.offload import offload_launch
from tightfit.plan.seconds.optimizer import update_launch
from tightfit.plan.seconds.recompute import Recompute
from tightfit.plan.seconds.tiles import TiledLaunches, tiled_launches

PLAIN = LAYER[""]
RECOMPUTED = {
    "nothing": LAYER["checkpoint_every=1"],
    "attention": LAYER["checkpoint_every=1 checkpoint_keep=attention"],
    "matmuls": LAYER["checkpoint_every=1 checkpoint_keep=matmuls"],
}
ADDED: tuple[Callable[[Levers], Launch | None], ...] = (fp8_launch, update_launch, offload_launch)
"""Levers that add launches to every layer: those of a layer with that lever alone, or None where it is not pulled."""
LAYER_MATRICES = 7
NOTHING = Launch(0.0, 0.0)


def host_share(layer_launch_ms: float | None) -> float:
    """A host's time to launch a plain layer and its update, as a share of the measured host's; its own for None."""
    return 1.0 if layer_launch_ms is None else layer_launch_ms / (sum(PLAIN) + UPDATE_MS[""])


def launch_s(
    levers: Levers, recompute: Recompute, layers: int, spec: ModelSpec, more: Launch = NOTHING
) -> tuple[float, float]:
    """Host seconds of forward and backward of one micro-batch through `layers` layers, with `more` for each."""
    tiled = tiled_launches(levers)
    forward_ms, backward_ms = PLAIN if tiled is None else tiled.layer
    norms = 2 * (spec.qk_norm + spec.sandwich_norms) * (1 if tiled is None else tiled.pieces)
    biases = _biases(spec)
    pieces = 1 if tiled is None else tiled.pieces
    more_forward_ms = norms * NORM.forward_ms + biases * BIAS.forward_ms + pieces * more.forward_ms
    more_backward_ms = norms * NORM.backward_ms + biases * BIAS.backward_ms + pieces * more.backward_ms
    forward_ms += more_forward_ms
    backward_ms += more_backward_ms + recompute.share * more_forward_ms
    if levers.update_in_backward:
        backward_ms += max(0, layer_tensors(spec) - USUAL_TENSORS) * TENSOR_UPDATE_MS
    for share, longer, base in _additions(levers, recompute, tiled):
        forward_ms += share * (longer.forward_ms - base.forward_ms)
        backward_ms += share * (longer.backward_ms - base.backward_ms)
    return 1e-3 * (REST.forward_ms + layers * forward_ms), 1e-3 * (REST.backward_ms + layers * backward_ms)


@lru_cache
def layer_tensors(spec: ModelSpec) -> int:
    """Parameters of one layer: matrices, biases and norms."""
    matrices = 4 + (3 if spec.gated else 2)
    norms = (2 + 2 * spec.sandwich_norms) * (2 if spec.norm == "layer" else 1) + 2 * spec.qk_norm
    return matrices + _biases(spec) + norms


def _biases(spec: ModelSpec) -> int:
    return 3 * spec.qkv_bias + spec.output_bias + (3 if spec.gated else 2) * spec.mlp_bias


def _additions(
    levers: Levers, recompute: Recompute, tiled: TiledLaunches | None
) -> Iterator[tuple[float, Launch, Launch]]:
    """Share of layers that pay what one measurement has beyond another."""
    for level, share in recompute.shares:
        more, base = (RECOMPUTED[level], PLAIN) if tiled is None else tiled.compared
        yield share, more, base
    for added in ADDED:
        if (launch := added(levers)) is not None:
            yield 1.0, launch, PLAIN


def update_launch_s(levers: Levers, *, wide: bool, layers: int, layer_params: float, ends: float) -> float:
    """Host seconds of the update that follows backward, of `layers` layers and of `ends` weights beside them."""
    name = "" if is_torch_adamw(levers, wide=wide) else "optimizer_states=8bit"
    further_chunks = 0.0
    if state_format(levers, wide=wide) == "factored":
        name = "optimizer_states=factored"
        further_chunks = max(0.0, (layers * layer_params + ends) / CHUNK_WEIGHTS - LAYER_MATRICES * layers)
    return 1e-3 * (UPDATE_REST_MS + layers * UPDATE_MS[name] + further_chunks * FURTHER_CHUNK_MS)
