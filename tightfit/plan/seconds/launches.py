"""Launches: the host's time to launch a micro-batch's kernels and the update's (hardware/launches.py).

Levers are assumed to add up: recomputed layers have checkpointing's further launches, all layers those of other levers
(`ADDED`). Tiled layers were measured as layers of their own (tiles.py). The measured layer is Llama's; for other
families the differences are counted: norms of queries and keys and after blocks, biases, routing, GPT-2's lack of rope
and gate, and an update for each matrix.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

from tightfit.hardware import launches as measured
from tightfit.hardware.launches import Launch
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.state_format import is_torch_adamw, state_format
from tightfit.jobs.workload import Workload
from tightfit.models.spec import ModelSpec
from tightfit.plan.seconds.fp8 import fp8_launch
from tightfit.plan.seconds.offload import offload_launch
from tightfit.plan.seconds.parameters import model_params
from tightfit.plan.seconds.passes import PassSeconds
from tightfit.plan.seconds.recompute import Recompute
from tightfit.plan.seconds.tiles import RECOMPUTED_TILES, tiled_launches

PLAIN = measured.LAYER[""]
RECOMPUTED = {
    "nothing": measured.LAYER["checkpoint_every=1"],
    "attention": measured.LAYER["checkpoint_every=1 checkpoint_keep=attention"],
    "matmuls": measured.LAYER["checkpoint_every=1 checkpoint_keep=matmuls"],
}
ADDED: tuple[Callable[[Levers], Launch | None], ...] = (fp8_launch, offload_launch)
"""Levers that add launches to every layer; each function gives those of a layer with that lever alone, or None."""
NOTHING = Launch(0.0, 0.0)


def launch_s(levers: Levers, recompute: Recompute, layers: int, spec: ModelSpec, more: Launch = NOTHING) -> PassSeconds:
    """Host seconds of forward and backward of one micro-batch through `layers` layers, with `more` for each."""
    pieces, (forward_ms, backward_ms) = tiled_launches(levers)
    parts = [*_beyond_llama(spec, pieces), (pieces, more)]
    more_forward_ms = sum(count * launch.forward_ms for count, launch in parts)
    more_backward_ms = sum(count * launch.backward_ms for count, launch in parts)
    forward_ms += more_forward_ms
    backward_ms += more_backward_ms + recompute.share * more_forward_ms
    if levers.update_in_backward:
        backward_ms += _matrices(spec) * measured.MATRIX_UPDATE_MS
    for share, longer, base in _additions(levers, recompute, is_tiled=pieces > 1):
        forward_ms += share * (longer.forward_ms - base.forward_ms)
        backward_ms += share * (longer.backward_ms - base.backward_ms)
    rest = measured.REST
    return PassSeconds(1e-3 * (rest.forward_ms + layers * forward_ms), 1e-3 * (rest.backward_ms + layers * backward_ms))


def _beyond_llama(spec: ModelSpec, pieces: int) -> list[tuple[int, Launch]]:
    """Counts and launch times of operations that a layer in `pieces` has beyond Llama's; negative counts: fewer."""
    return [
        (2 * (spec.qk_norm + spec.sandwich_norms) * pieces, measured.NORM),
        (_biases(spec), measured.BIAS),
        (pieces if spec.experts is not None else 0, measured.EXPERTS),
        (-pieces if spec.rope is None and not spec.gated else 0, measured.ROPE_AND_GATE),
    ]


@lru_cache
def layer_tensors(spec: ModelSpec) -> int:
    """Parameters of one layer: matrices, biases and norms."""
    return _matrices(spec) + layer_vectors(spec)


@lru_cache
def layer_vectors(spec: ModelSpec) -> int:
    """Biases and norms of one layer."""
    norms = (2 + 2 * spec.sandwich_norms) * (2 if spec.norm == "layer" else 1) + 2 * spec.qk_norm
    return _biases(spec) + norms


def late_update_launch_s(spec: ModelSpec, layers: int) -> float:
    """Host seconds of launching updates of norms and biases after a backward that has updated the matrices."""
    return 1e-3 * (measured.LATE_UPDATE_MS + layers * layer_vectors(spec) * measured.VECTOR_UPDATE_MS)


def _matrices(spec: ModelSpec) -> int:
    return 4 + (3 if spec.gated else 2)


def _biases(spec: ModelSpec) -> int:
    return 3 * spec.qkv_bias + spec.output_bias + (3 if spec.gated else 2) * spec.mlp_bias


def _additions(levers: Levers, recompute: Recompute, *, is_tiled: bool) -> Iterator[tuple[float, Launch, Launch]]:
    """(share of layers, launches, base): that share of layers takes launches − base longer."""
    for level, share in recompute.shares:
        yield share, *(RECOMPUTED_TILES if is_tiled else (RECOMPUTED[level], PLAIN))
    for added in ADDED:
        if (launch := added(levers)) is not None:
            yield 1.0, launch, PLAIN


def update_launch_s(workload: Workload, layout: Layout, levers: Levers, layers: int) -> float:
    """Host seconds of launching the update after backward on a rank with `layers` layers; 0 with updates inside
    backward, whose launches are backward's."""
    if levers.update_in_backward:
        return 0.0
    spec, wide = workload.spec, workload.updates_wide
    name = "" if is_torch_adamw(levers, wide=wide) else "optimizer_states=8bit"
    tensors, further_chunks = layer_tensors(spec), 0.0
    if state_format(levers, wide=wide) == "factored":
        name, tensors = "optimizer_states=factored", measured.USUAL_TENSORS  # most of it is for the matrices
        model = model_params(spec)
        params = layers * (model.layer + model.layer_experts) + model.ends / layout.weight_ranks
        further_chunks = max(0.0, params / measured.CHUNK_WEIGHTS - measured.USUAL_MATRICES * layers)
    layer_ms = measured.UPDATE_MS[name] * tensors / measured.USUAL_TENSORS
    return 1e-3 * (measured.UPDATE_REST_MS + layers * layer_ms + further_chunks * measured.FURTHER_CHUNK_MS)
