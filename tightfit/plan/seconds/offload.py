"""Offload: copies over the host link that compute does not hide, in the order in which they are made.

    forward     weights are copied in, checkpoints out
    backward    weights and checkpoints are copied in; states go in, are updated and go out as gradients are complete,
                except those of the last layers, which are deferred
    after it    copies that are still queued, and the embedding's: its gradient is last, and forward needs it first
    forward     deferred states are copied and updated beside it

Without updates inside backward all states are copied in the next forward pass, in its order: it begins with the
embedding, whose copies nothing hides. Copies of states go both ways at once, each slower than one way alone
(benchmarks/calibrate.py). The model is of a run of many steps: if the caller waits for each step to end, nothing
overlaps with the next forward pass. The host queues each piece's copies and update in the pass that they belong to,
beside the layers' launches: with many small matrices that takes longer than the link.

States are updated and masters cast by kernels, which wait for the layers' long ones (long_kernels.py). The link stalls
meanwhile, except for copies that need no kernel on arrival: checkpoints, and weights without masters.
"""

from dataclasses import dataclass
from functools import cached_property

from tightfit.hardware.launches import LAYER, NOTHING, PIECE_LAUNCH_MS, Launch
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.jobs.state_format import state_format
from tightfit.levers.policy.offload import (
    IN_FLIGHT_BYTES,
    MASTER_SLOTS,
    PIECE_ELEMENTS,
    STATE_SLOTS,
    offloads_states,
    offloads_weights,
)
from tightfit.memory.formulas.states import kept_weights, offloaded_bytes, passing_bytes
from tightfit.plan.seconds.cost_context import CostContext
from tightfit.plan.seconds.long_kernels import LongKernels
from tightfit.plan.seconds.parameters import RankParams
from tightfit.plan.seconds.passes import PassSeconds
from tightfit.plan.seconds.products import layer_linears


def offload_launch(levers: Levers) -> Launch:
    """Launches that offloaded states add to a layer, besides those of their pieces (`OffloadTime.queued`)."""
    return LAYER["offload=optimizer"].beyond(LAYER[""]) if offloads_states(levers) else NOTHING


@dataclass(frozen=True, kw_only=True)
class StateTraffic:
    """Link seconds of states that are copied during forward, during backward, and after it."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    after_s: float = 0.0
    ahead_s: float = 0.0
    """Seconds of copies in that the staging ring can hold while no update runs."""
    deferred_share: float = 0.0
    """Share of the layers, from the last back, whose states are copied in the next forward pass."""
    head_s: float = 0.0
    """Link seconds of an output projection whose gradient alone exceeds IN_FLIGHT_BYTES: compute waits for its update
    before another update is sent."""


NO_STATES, NO_LAUNCHES = StateTraffic(), PassSeconds()


@dataclass(frozen=True, kw_only=True)
class OffloadTime:
    """Seconds that a step waits for one rank's link to the host."""

    ctx: CostContext
    layout: Layout
    levers: Levers
    params: RankParams
    micro_batches: int

    @property
    def moves_nothing(self) -> bool:
        """Whether nothing goes over the link."""
        return not (offloads_states(self.levers) or self.levers.offload_checkpoints)

    def step_s(
        self,
        *,
        checkpoint_bytes: float,
        passes: PassSeconds,
        kernels: LongKernels,
        launches: PassSeconds = NO_LAUNCHES,
    ) -> float:
        """Exposed seconds of a step; each micro-batch offloads `checkpoint_bytes`.

        `passes` are a micro-batch's seconds on the card, which hide copies; `kernels` its long kernels, during which
        the link may stall; `launches` the host's seconds of launching it. States pass with one micro-batch of a step.
        """
        checkpoints_s = self._checkpoints_s(checkpoint_bytes)
        left_s = self._left_s(checkpoints_s, passes, kernels, NO_STATES, NO_LAUNCHES)
        if not offloads_states(self.levers):
            return self.micro_batches * left_s
        host = launches.plus(self.queued, self.ctx.host_share)
        return (self.micro_batches - 1) * left_s + self._left_s(checkpoints_s, passes, kernels, self.states, host)

    def _left_s(
        self,
        checkpoints_s: float,
        passes: PassSeconds,
        kernels: LongKernels,
        states: StateTraffic,
        host: PassSeconds,
    ) -> float:
        """Seconds that one micro-batch with `states` waits: in each pass for what takes longest beyond the card's own
        work. `host` is the host's time to launch and queue."""
        weights, moving = self._weights, self.moving(passes, kernels, states)
        cast = weights if self._casts_masters else PassSeconds()
        deferred_layers_s = states.deferred_share * moving.backward_s  # the last layers, with which backward begins
        sending_s = (1 - states.deferred_share) * moving.backward_s
        forward_left_s = max(
            0.0,
            checkpoints_s - passes.forward_s,  # the link: out
            weights.forward_s + states.forward_s - passes.forward_s,  # and in
            host.forward_s - passes.forward_s,
            cast.forward_s + states.forward_s - moving.forward_s,  # casts and updates between long kernels
        )
        backward_left_s = max(
            0.0,
            checkpoints_s + weights.backward_s + states.backward_s - passes.backward_s,
            host.backward_s - passes.backward_s,
            cast.backward_s + states.backward_s - moving.backward_s,
            states.backward_s - sending_s,  # none is sent beside the deferred layers
            states.head_s - deferred_layers_s,  # nor before the head is updated
        )
        return forward_left_s + backward_left_s + states.after_s

    def _checkpoints_s(self, checkpoint_bytes: float) -> float:
        """Seconds to copy a micro-batch's checkpoints one way."""
        if not self.levers.offload_checkpoints:
            return 0.0
        limit_bytes = self.levers.checkpoint_host_bytes
        sent_bytes = checkpoint_bytes if limit_bytes is None else min(checkpoint_bytes, limit_bytes)
        return sent_bytes / self._one_way_bytes_s

    def moving(self, passes: PassSeconds, kernels: LongKernels, states: StateTraffic = NO_STATES) -> PassSeconds:
        """Seconds of each pass in which the link moves states and masters: all but its stalls."""
        casts_bytes = (MASTER_SLOTS - 1) * PIECE_ELEMENTS * FLOAT32_BYTES if self._casts_masters else 0
        ahead_s = casts_bytes / self._one_way_bytes_s
        stalls = kernels.stalls(
            forward_ahead_s=max(ahead_s, states.ahead_s) if states.forward_s else ahead_s,
            backward_ahead_s=max(ahead_s, states.ahead_s) if states.backward_s else ahead_s,
        )
        return PassSeconds(*(max(0.0, each_s) for each_s in passes.plus(stalls, -1)))

    @cached_property
    def queued(self) -> PassSeconds:
        """Host seconds of queueing the pieces of the layers' states in forward and in backward."""
        if self._host_can_update:
            return PassSeconds()
        offloaded_share = self._offloaded / max(1.0, self.params.owned)
        pieces_s = 1e-3 * PIECE_LAUNCH_MS * offloaded_share * self._pieces
        in_forward = self.states.deferred_share if self.levers.update_in_backward else 1.0
        return PassSeconds(forward_s=in_forward * pieces_s, backward_s=(1 - in_forward) * pieces_s)

    @property
    def _pieces(self) -> float:
        """Pieces of the layers' states on this rank; every matrix has at least one."""
        params, linears = self.params, layer_linears(self.ctx.workload.spec)
        owned_share = params.owned / params.all
        layer_pieces = sum(
            linear.count * max(1.0, linear.weights / linear.count * owned_share / PIECE_ELEMENTS) for linear in linears
        )
        layers = (params.owned - params.owned_ends) / max(1.0, owned_share * linears.weights)
        return layers * layer_pieces

    @property
    def _one_way_bytes_s(self) -> float:
        return self.ctx.machine.host_copy_bytes_s

    @property
    def _casts_masters(self) -> bool:
        """Whether what arrives of the layers' weights are masters, from which they are cast."""
        return offloads_weights(self.levers) and self.ctx.workload.has_masters

    @property
    def _weights(self) -> PassSeconds:
        """Seconds to fetch the layers' weights, or their masters, for forward, and again for backward."""
        if not offloads_weights(self.levers):
            return PassSeconds()
        layers = min(self._offloaded, self.params.owned - self.params.owned_ends)
        copied_s = layers * self.ctx.workload.updated_bytes / self._one_way_bytes_s
        beside_states_s = copied_s / self.ctx.efficiency.link_both_ways  # which leave while weights come
        return PassSeconds(copied_s, beside_states_s if self.levers.update_in_backward else copied_s)

    @cached_property
    def states(self) -> StateTraffic:
        """Link seconds of offloaded states by when they are copied: the embedding's after backward, deferred ones in
        the next forward pass, all others in backward; without updates inside backward all but the embedding's are
        deferred."""
        workload, params, offloaded = self.ctx.workload, self.params, self._offloaded
        kept = params.owned - offloaded  # the vocabulary's matrices are kept first
        last = min(offloaded, max(0.0, params.owned_embedding - kept))
        deferred = others = offloaded - last
        if self.levers.update_in_backward:  # levers/offload.py chooses them by these bytes
            waiting_bytes = max(0, self.levers.offload_gradient_bytes - IN_FLIGHT_BYTES)
            deferred = min(others, waiting_bytes / workload.updated_bytes)
        head = min(others - deferred, max(0.0, params.owned_ends - params.owned_embedding))
        each_s = self._offloaded_s / max(1.0, offloaded)
        return StateTraffic(
            forward_s=deferred * each_s,
            backward_s=(others - deferred) * each_s,
            after_s=last * each_s,
            ahead_s=STATE_SLOTS / 2 * PIECE_ELEMENTS * each_s,  # the other half of the ring is on its way out
            deferred_share=min(1.0, deferred / max(1.0, params.owned - params.owned_ends)),
            head_s=head * each_s if head * workload.weight_bytes > IN_FLIGHT_BYTES else 0.0,
        )

    @property
    def _offloaded_s(self) -> float:
        """Seconds of a step's states: copies both ways or, where the host updates them, its AdamW or its copies of
        gradients and weights, whichever takes longer."""
        ctx, levers, offloaded = self.ctx, self.levers, self._offloaded
        both_ways_bytes_s = self._one_way_bytes_s * ctx.efficiency.link_both_ways
        on_gpu_s = offloaded * passing_bytes(ctx.workload, levers) / both_ways_bytes_s
        if not self._host_can_update:
            return on_gpu_s
        ranks_on_host = min(ctx.machine.per_node, self.layout.ranks)
        host_adam_s = offloaded * ranks_on_host / ctx.efficiency.host_adam_params_s
        on_host_s = max(offloaded * FLOAT32_BYTES / self._one_way_bytes_s, host_adam_s)
        return on_host_s if levers.offload_update == "host" else min(on_gpu_s, on_host_s)

    @property
    def _host_can_update(self) -> bool:
        wide = self.ctx.workload.has_masters and state_format(self.levers, wide=True) == "fp32"
        return self.levers.offload_update != "gpu" and wide

    @cached_property
    def _offloaded(self) -> float:
        """This rank's weights whose states are on the host."""
        owned, workload, levers = self.params.owned, self.ctx.workload, self.levers
        if not levers.offload_keep_bytes:
            return owned
        return owned - kept_weights(workload, self.layout, levers, int(owned), offloaded_bytes(workload, levers))
