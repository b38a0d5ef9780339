"""Launches: the host's time to launch a step's kernels (hardware/launches.py), and the card's waits for them.

Levers are assumed to add up: recomputed layers have checkpointing's further launches, all layers those of fp8 and
offload. Tiled layers were measured as layers of their own (tiles.py). The measured layer is Llama's; for other families
the differences are counted: norms of queries and keys and after blocks, biases, routing, GPT-2's lack of rope and gate,
and an update for each matrix.

The host launches kernels ahead of the card. Where launching takes longer than the work, the card waits:

    forward     launches of forward − the card's forward
    backward    launches of both passes − the card's, less what forward waited

Where the host launches the update before it reads the loss, it launches the next forward while the card updates. With
updates inside backward it waits for the card at the end of forward, so that the card idles at least until the loss's
backward is launched. A slow host's step is captured as a CUDA graph where that is possible.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from tightfit.hardware import launches as measured
from tightfit.hardware.launches import LAYER, NOTHING, Launch
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.cuda_graph import may_capture
from tightfit.jobs.state_format import is_torch_adamw, state_format
from tightfit.jobs.workload import Workload
from tightfit.models.spec import ModelSpec
from tightfit.plan.seconds.adapter import adapter_launch
from tightfit.plan.seconds.cost_context import CostContext
from tightfit.plan.seconds.fp8 import fp8_launch
from tightfit.plan.seconds.offload import offload_launch
from tightfit.plan.seconds.parameters import model_params
from tightfit.plan.seconds.passes import PassSeconds
from tightfit.plan.seconds.recompute import Recompute
from tightfit.plan.seconds.tiles import RECOMPUTED_TILES, tiled_launches

RECOMPUTED = {
    "nothing": LAYER["checkpoint_every=1"].beyond(LAYER[""]),
    "attention": LAYER["checkpoint_every=1 checkpoint_keep=attention"].beyond(LAYER[""]),
    "matmuls": LAYER["checkpoint_every=1 checkpoint_keep=matmuls"].beyond(LAYER[""]),
}
"""Launches that recomputation adds to a layer, by what the layer keeps."""


def launch_s(levers: Levers, recompute: Recompute, layers: int, spec: ModelSpec, more: Launch = NOTHING) -> PassSeconds:
    """Host seconds of forward and backward of one micro-batch through `layers` layers, with `more` for each."""
    pieces, (forward_ms, backward_ms) = tiled_launches(levers)
    beyond_llama = [
        (2 * (spec.qk_norm + spec.sandwich_norms) * pieces, measured.NORM),
        (_biases(spec), measured.BIAS),
        (pieces if spec.experts is not None else 0, measured.EXPERTS),
        (-pieces if spec.rope is None and not spec.gated else 0, measured.ROPE_AND_GATE),  # GPT-2 has neither
        (pieces, more),
    ]
    more_forward_ms = sum(count * launch.forward_ms for count, launch in beyond_llama)
    more_backward_ms = sum(count * launch.backward_ms for count, launch in beyond_llama)
    forward_ms += more_forward_ms
    backward_ms += more_backward_ms + recompute.share * more_forward_ms
    if levers.update_in_backward:
        backward_ms += _matrices(spec) * measured.MATRIX_UPDATE_MS
    recomputed = [(share, RECOMPUTED_TILES if pieces > 1 else RECOMPUTED[level]) for level, share in recompute.shares]
    for share, added in (*recomputed, (1.0, fp8_launch(levers)), (1.0, offload_launch(levers))):
        forward_ms += share * added.forward_ms
        backward_ms += share * added.backward_ms
    rest = measured.REST
    return PassSeconds(1e-3 * (rest.forward_ms + layers * forward_ms), 1e-3 * (rest.backward_ms + layers * backward_ms))


@lru_cache
def layer_tensors(spec: ModelSpec) -> int:
    """Parameters of one layer: matrices, biases and norms."""
    return _matrices(spec) + layer_vectors(spec)


@lru_cache
def layer_vectors(spec: ModelSpec) -> int:
    """Biases and norms of one layer."""
    norms = spec.norms_per_layer * (2 if spec.norm == "layer" else 1) + 2 * spec.qk_norm
    return _biases(spec) + norms


def late_update_launch_s(spec: ModelSpec, layers: int) -> float:
    """Host seconds of launching updates of norms and biases after a backward that has updated the matrices."""
    return 1e-3 * (measured.LATE_UPDATE_MS + layers * layer_vectors(spec) * measured.VECTOR_UPDATE_MS)


def _matrices(spec: ModelSpec) -> int:
    return 4 + spec.up_projections + 1


def _biases(spec: ModelSpec) -> int:
    return 3 * spec.qkv_bias + spec.output_bias + (spec.up_projections + 1) * spec.mlp_bias


def update_launch_s(workload: Workload, levers: Levers, layers: int, expert: int = 1) -> float:
    """Host seconds of launching the update after backward on a rank with `layers` layers, of whose experts it holds one
    in `expert`."""
    spec, wide = workload.spec, workload.updates_wide
    name = "" if is_torch_adamw(levers, wide=wide) else "optimizer_states=8bit"
    tensors, further_chunks = layer_tensors(spec), 0.0
    if state_format(levers, wide=wide) == "factored":
        name, tensors = "optimizer_states=factored", measured.USUAL_TENSORS  # most of it is for the matrices
        model = model_params(spec)
        # Whole but for experts: rules refuse tensor ranks and ZeRO.
        params = layers * (model.layer + model.layer_experts / expert) + model.ends
        further_chunks = max(0.0, params / measured.CHUNK_WEIGHTS - measured.USUAL_MATRICES * layers)
    layer_ms = measured.UPDATE_MS[name] * tensors / measured.USUAL_TENSORS
    return 1e-3 * (measured.UPDATE_REST_MS + layers * layer_ms + further_chunks * measured.FURTHER_CHUNK_MS)


@dataclass(frozen=True, kw_only=True)
class HostLaunches:
    """What the host launches in a step, beside the card's own seconds of it."""

    ctx: CostContext
    layout: Layout
    levers: Levers
    layers: int
    micro_batches: int
    compute: PassSeconds
    """The card's seconds of a micro-batch without recomputation."""
    recomputed: Recompute
    update_s: float
    """The card's seconds of the update."""

    @cached_property
    def is_captured(self) -> bool:
        """Whether forward and backward, with updates inside it, are launched as a CUDA graph: where it is possible and
        a slow host (SLOW_HOST × the launches) would take longer than the card."""
        workload, levers = self.ctx.workload, self.levers
        if not (workload.engine.captures and may_capture(workload, self.layout, levers)):
            return False
        card_s = self.compute.both_s + self.recomputed.seconds
        card_s += self.update_s if levers.update_in_backward else 0.0
        return levers.cuda_graph == "always" or measured.SLOW_HOST * self._reference_launches.both_s > card_s

    @cached_property
    def launches(self) -> PassSeconds:
        """The host's seconds of launching a micro-batch's forward and backward, or of replaying their graph."""
        return PassSeconds(forward_s=self._replay_s) if self.is_captured else self._launches(self.ctx.launch_share)

    @cached_property
    def waits(self) -> PassSeconds:
        """Seconds that the card waits for launches in a micro-batch's forward and in its backward."""
        launches = self.launches
        card_forward_s, card_backward_s = self.compute.forward_s, self.compute.backward_s + self.recomputed.seconds
        host_backward_s = launches.backward_s
        if self._launches_update_before_loss:
            host_backward_s += self._update_launch_s / self.micro_batches
            card_forward_s += self.update_s / self.micro_batches
        forward_late_s = max(0.0, launches.forward_s - card_forward_s)
        if self.levers.update_in_backward and not self.is_captured:
            began_s = 1e-3 * self.ctx.launch_share * measured.REST.backward_ms
            return PassSeconds(forward_late_s, max(began_s, host_backward_s - card_backward_s - self.update_s))
        late_s = launches.forward_s + host_backward_s - card_forward_s - card_backward_s
        return PassSeconds(forward_late_s, max(0.0, late_s - forward_late_s))

    @property
    def step_waits_s(self) -> float:
        """Seconds of a step in which the card waits for launches; even with its host ahead it idles between kernels."""
        return max(self.micro_batches * self.waits.both_s, self._idle_s)

    @property
    def step_update_s(self) -> float:
        """The update: the card's seconds, or the host's for launching it if longer and nothing else is queued.

        With updates inside backward, matrices are updated there; after it the card waits for the launches of the
        remaining updates (norms and biases).
        """
        if not self.levers.update_in_backward:
            hides_launches = self._launches_update_before_loss
            return self.update_s if hides_launches else max(self.update_s, self._update_launch_s)
        if self.is_captured:
            return self.update_s
        return self.update_s + self.ctx.host_share * late_update_launch_s(self.ctx.workload.spec, self.layers)

    @property
    def _idle_s(self) -> float:
        """Idle seconds of a card though its host is ahead; 0 in a pipeline, whose ranks wait for each other instead."""
        if self.layout.pipeline > 1:
            return 0.0
        if not (self._launches_update_before_loss or self.is_captured):
            return 1e-3 * self.ctx.launch_share * measured.STEP_IDLE_MS
        gaps_s = measured.GAP_SHARE * (self.micro_batches * self._reference_launches.both_s)
        updates_in_graph = self.levers.update_in_backward and self.is_captured
        return gaps_s + self._replay_s if updates_in_graph else gaps_s  # no kernel runs while a replay is prepared

    @property
    def _replay_s(self) -> float:
        """The host's seconds of replaying a CUDA graph of forward and backward."""
        return 1e-3 * self.ctx.launch_share * measured.REPLAY_MS

    @cached_property
    def _reference_launches(self) -> PassSeconds:
        """Launches one by one on the host on which they were measured."""
        return self._launches(self.ctx.workload.engine.launch_share)

    def _launches(self, share: float) -> PassSeconds:
        """Seconds to launch a micro-batch's forward and backward, on a host that takes `share` of the measured time."""
        workload = self.ctx.workload
        ours = launch_s(self.levers, self.recomputed, self.layers, workload.spec, adapter_launch(workload))
        backwards = 2 if self.layout.splits_backward else 1  # autograd runs for inputs, then again for weights
        return PassSeconds(share * ours.forward_s, share * ours.backward_s * backwards)

    @cached_property
    def _launches_update_before_loss(self) -> bool:
        """Whether the host launches the update before it reads the loss; torch's AdamW skips non-finite gradients by
        itself."""
        workload = self.ctx.workload
        return workload.engine.launches_update_before_loss and is_torch_adamw(self.levers, wide=workload.updates_wide)

    @cached_property
    def _update_launch_s(self) -> float:
        """The host's seconds of launching the update after backward."""
        measured_s = update_launch_s(self.ctx.workload, self.levers, self.layers, self.layout.expert)
        return self.ctx.host_share * measured_s
