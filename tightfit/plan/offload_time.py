"""Offload's time: copies over the host link that compute does not hide, in the order they are made.

    forward     weights come, checkpoints go; updates that were put off (`late`) pass
    backward    weights and checkpoints come; states pass as their gradients come, but for the late ones
    after it    what waits in line still, and the embedding, whose gradient is the last: the next forward pass begins
                with it, so nothing hides these

Without updates inside backward all states pass in the next forward pass, in its order: it begins with the embedding,
whose states nothing hides. States pass both ways at once, each slower than one way alone (benchmarks/calibrate.py).
This is a run of many steps: where each step is waited for by itself, nothing is hidden behind the next forward pass.
"""

from dataclasses import dataclass

from tightfit.hardware.efficiency import Efficiency
from tightfit.hardware.machine import Machine
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.state_format import moment_bytes, state_format
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.states import IN_FLIGHT_BYTES, kept_weights

WIDE_BYTES = 4


@dataclass(frozen=True)
class OffloadTime:
    """Of a rank that owns `params`, of which `embedding` are the embedding's and `outside` these and the head's."""

    workload: Workload
    machine: Machine
    layout: Layout
    efficiency: Efficiency
    params: float
    embedding: float
    outside: float
    micro_batches: int

    def exposed_s(self, levers: Levers, checkpoint_bytes: float, forward_s: float, backward_s: float) -> float:
        """Of a step, with so many bytes of checkpoints and so much compute of a micro-batch to hide behind."""
        if levers.offload == "none" and not levers.offload_checkpoints:
            return 0.0
        moved_s = checkpoint_bytes / self._link_bytes_s if levers.offload_checkpoints else 0.0
        fetched_s = self._fetched_s(levers)
        plain = _beyond(max(moved_s, fetched_s), forward_s) + _beyond(moved_s + fetched_s, backward_s)
        if levers.offload == "none":
            return self.micro_batches * plain
        once = self._with_states_s(levers, moved_s, fetched_s, forward_s, backward_s)
        return (self.micro_batches - 1) * plain + once

    def _with_states_s(
        self, levers: Levers, moved_s: float, fetched_s: float, forward_s: float, backward_s: float
    ) -> float:
        """Of the micro-batch beside which states pass."""
        away = self._away(levers)
        each_s = self._states_s(levers, away) / max(1.0, away)
        inside, last, late = self._when(levers, away)
        forward = _beyond(max(moved_s, fetched_s + late * each_s), forward_s)
        return forward + _beyond(moved_s + fetched_s + inside * each_s, backward_s) + last * each_s

    def _when(self, levers: Levers, away: float) -> tuple[float, float, float]:
        """Of the weights that are `away`, those updated beside backward, after it, and beside the next forward pass."""
        kept = self.params - away  # the vocabulary's matrices are kept first
        alone = max(0.0, self.embedding - kept)
        if not levers.update_in_backward:
            return 0.0, min(away, alone), max(0.0, away - alone)
        late = min(away, max(0, levers.offload_gradient_bytes - IN_FLIGHT_BYTES) / self.workload.weight_bytes)
        last = min(away - late, alone)
        return away - late - last, last, late

    @property
    def _link_bytes_s(self) -> float:
        """Of a copy one way."""
        return self.machine.accelerator.host.copy_bytes_s

    def _fetched_s(self, levers: Levers) -> float:
        """Link seconds of the layers' weights, once."""
        if levers.offload != "weights":
            return 0.0
        each = WIDE_BYTES if self.workload.has_masters else self.workload.weight_bytes
        return min(self._away(levers), self.params - self.outside) * each / self._link_bytes_s

    def _states_s(self, levers: Levers, away: float) -> float:
        """Link seconds of a step's states, or the time the host takes where it updates them."""
        workload, both_bytes_s = self.workload, self._link_bytes_s * self.efficiency.link_both_ways
        passing = away * self._passing_bytes(levers) / both_bytes_s
        ranks = min(self.machine.per_node, self.layout.ranks)
        on_host = max(away * WIDE_BYTES / self._link_bytes_s, away * ranks / self.efficiency.host_adam_params_s)
        wide = workload.has_masters and state_format(levers, wide=True) == "fp32"
        if levers.offload_update == "gpu" or not wide:
            return passing
        return on_host if levers.offload_update == "host" else min(passing, on_host)

    def _passing_bytes(self, levers: Levers) -> float:
        """Of one weight, each way: moments, and the master or a weight that is away as well."""
        workload = self.workload
        updated = WIDE_BYTES if workload.has_masters else workload.weight_bytes if levers.offload == "weights" else 0
        return moment_bytes(levers, wide=workload.updates_wide) + updated

    def _away(self, levers: Levers) -> float:
        """This rank's weights whose belongings are on the host."""
        if not levers.offload_keep_bytes:
            return self.params
        kept = moment_bytes(levers, wide=self.workload.updates_wide)
        kept += WIDE_BYTES if self.workload.has_masters else 0
        kept += self.workload.weight_bytes if levers.offload == "weights" else 0
        return self.params - kept_weights(self.workload, self.layout, levers, int(self.params), kept)[1]


def _beyond(traffic_s: float, compute_s: float) -> float:
    return max(0.0, traffic_s - compute_s)
