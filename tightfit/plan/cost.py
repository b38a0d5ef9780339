"""Cost: how long one optimizer step takes, for a layout and levers on a machine.

    step = M × (forward + backward + recompute + launches and traffic that compute does not hide)
           + bubble + gradients + optimizer

M micro-batches run through the slowest pipeline rank. Compute is matrix products, attention and memory-bound kernels
at the measured shares of the card's rates (layer_time.py); where the host needs longer to launch it, the card waits
(launch_time.py). Tensor and expert collectives wait in line; what context ranks hand on hides behind attention
(ring.py), gathered weights and reduced gradients behind the layers (all but one layer's), copies to the host behind
both (offload_time.py). What ZeRO stages send is parallel/data.py's table. Not modelled: stragglers, data loading.

`Costs` belongs to one workload and machine and does what depends on the layout once (`frame`), so that a search can
try many levers on it (`Frame.step`).
"""

import math
from dataclasses import dataclass

from tightfit.hardware.efficiency import MEASURED, Efficiency
from tightfit.hardware.machine import Machine
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.keeping import Level, is_checkpointed, layer_levels
from tightfit.memory.formulas.pipeline import layer_counts
from tightfit.memory.formulas.share import share_of
from tightfit.plan.bubble import bubble_s
from tightfit.plan.communication import Group, make_group
from tightfit.plan.fp8_time import fp8_s
from tightfit.plan.launch_time import LaunchTime
from tightfit.plan.layer_time import LayerTime, card_rates, layer_time
from tightfit.plan.offload_time import OffloadTime
from tightfit.plan.ring import Ring
from tightfit.plan.steptime import StepTime
from tightfit.plan.tile_time import tiled_s
from tightfit.plan.traffic import TensorCalls, again_calls, forward_calls, regather_calls
from tightfit.plan.update_time import added_bytes, moved_bytes, update_share
from tightfit.plan.work import layer_work, sharded_params

Shares = tuple[tuple[Level, float], ...]
"""What some layers keep, and the share that does."""
CONTENTION = 16 / 132
"""Of an H100's multiprocessors, those that NCCL's kernels take (one per channel) from the compute they hide behind."""


class Costs:
    """Step times of one workload on one machine."""

    def __init__(self, workload: Workload, machine: Machine, efficiency: Efficiency = MEASURED) -> None:
        self.workload, self.machine, self.efficiency = workload, machine, efficiency
        self.rates = card_rates(workload, machine, efficiency)
        self._groups: dict[tuple[int, int], Group] = {}
        self._layers: dict[tuple[int, int, int, bool], LayerTime] = {}

    def group(self, stride: int, size: int) -> Group:
        """The ranks `stride` apart."""
        key = (stride, size)
        if key not in self._groups:
            self._groups[key] = make_group(self.machine, stride, size)
        return self._groups[key]

    def layer(self, layout: Layout) -> LayerTime:
        """One layer under `layout`."""
        key = (layout.micro_batch, layout.tensor, layout.context, layout.sequence_parallel)
        if key not in self._layers:
            self._layers[key] = layer_time(self.workload, self.rates, *key)
        return self._layers[key]

    def step(self, layout: Layout, levers: Levers) -> StepTime:
        """One optimizer step."""
        return self.frame(layout).step(levers)

    def frame(self, layout: Layout) -> "Frame":
        """What a step of `layout` costs before levers."""
        return Frame(self, layout)


@dataclass(frozen=True)
class _Sync:
    """Data ranks' traffic of one whole pass over a rank's parameters, and the share that nothing can hide."""

    gather_s: float
    reduce_s: float
    all_reduce_s: float
    unpack_s: float
    """FSDP2 copies what it has gathered into weights, on the stream that computes."""
    pack_s: float
    """And gradients, widened, into what it reduces, on the stream that does."""


class Frame:
    """The parts of a step that depend on the layout alone; `step` adds what levers change."""

    def __init__(self, costs: Costs, layout: Layout) -> None:
        self.costs, self.layout = costs, layout
        workload, spec = costs.workload, costs.workload.spec
        self.micro_batches = workload.global_batch // (layout.micro_batch * layout.data)
        self.counts = layer_counts(spec, workload.sequence_length, layout.pipeline, layout.stages_per_rank)
        self.layers = max(self.counts)
        self.wide = workload.updates_wide
        self.tokens = layout.micro_batch * workload.sequence_length / layout.context
        self.time = costs.layer(layout)
        self._count_params()
        self._count_compute()
        self._count_collectives()
        self.sync = self._sync()
        ends = sharded_params(spec)[2] / layout.tensor
        self.launches = LaunchTime(self.layers, sum(sharded_params(spec)[:2]), ends)
        self.offload = OffloadTime(
            workload, costs.machine, layout, costs.efficiency, self.own_params,
            ends / (1 if spec.tied else 2) * self.own_params / (self.dense + self.experts),
            ends * self.own_params / (self.dense + self.experts), self.micro_batches,
        )  # fmt: skip

    def _count_params(self) -> None:
        """Parameters of the fullest rank, dense ones and experts, and what is left of them after sharding."""
        layout, spec = self.layout, self.costs.workload.spec
        dense, experts, ends = sharded_params(spec)
        if layout.pipeline > 1:
            ends = max(spec.embedding_params, spec.vocab_size * spec.hidden_size)
        self.dense = (dense * self.layers + ends) / layout.tensor
        self.experts = experts * self.layers / layout.tensor / layout.expert
        shards = layout.data * layout.context // layout.copies if layout.zero else 1
        self.root_share = ends / layout.tensor / (self.dense + self.experts)
        self.own_params = self.dense / shards + self.experts / (max(1, shards // layout.expert) if layout.zero else 1)

    def _count_compute(self) -> None:
        """Forward and backward of one micro-batch on the slowest pipeline rank."""
        time, last = self.time, self.counts[-1]
        self.forward_s = max(self.layers * time.forward_s, last * time.forward_s + time.head_forward_s)
        self.backward_s = max(self.layers * time.backward_s, last * time.backward_s + time.head_backward_s)

    def _count_collectives(self) -> None:
        """What tensor, context, expert and pipeline ranks exchange for one micro-batch, one way."""
        layout, workload, costs = self.layout, self.costs.workload, self.costs
        spec, width = workload.spec, workload.weight_bytes
        tokens = self.tokens
        hidden_bytes = tokens * spec.hidden_size * width
        outer = layout.tensor if layout.sequence_parallel else 1
        self._count_tensor(hidden_bytes)
        ring = self._ring(tokens)
        self.context_forward_s = self.layers * ring.forward_s(self.time.attention_forward_s)
        self.context_backward_s = self.layers * ring.backward_s(self.time.attention_backward_s)
        self.expert_s = 0.0
        if spec.experts is not None and layout.expert > 1:
            away = costs.group(layout.tensor, layout.expert).all_to_all_s(hidden_bytes / outer * spec.experts.per_token)
            self.expert_s = 2 * self.layers * layer_work(spec).routed_share * away
        stages = costs.group(layout.tensor * layout.context * layout.data, layout.pipeline)
        self.send_s = layout.stages_per_rank * stages.send_s(hidden_bytes / outer)
        self.checkpoint_bytes = hidden_bytes / outer

    def _ring(self, tokens: float) -> Ring:
        """The ring of context ranks, for one layer."""
        layout, spec, costs = self.layout, self.costs.workload.spec, self.costs
        queries, keys = (tokens * size / layout.tensor for size in (spec.query_size, 2 * spec.kv_size))
        hand_on_s = costs.group(layout.tensor, layout.context).send_s(keys * costs.workload.weight_bytes)
        return Ring(layout.context, hand_on_s, queries, keys, costs.rates.bytes_s, CONTENTION)

    def _count_tensor(self, hidden_bytes: float) -> None:
        """What tensor ranks exchange: one way, to recompute all layers, and behind backward."""
        group, split = self.costs.group(1, self.layout.tensor), self.layout.sequence_parallel
        reduce_s, gather_s = group.all_reduce_s(hidden_bytes), group.all_gather_s(hidden_bytes)

        def seconds(calls: TensorCalls) -> float:
            return calls.all_reduces * reduce_s + (calls.all_gathers + calls.reduce_scatters) * gather_s

        self.tensor_s = seconds(forward_calls(self.layers, sequence_parallel=split, ends=0))
        self.tensor_s += self._ends() * seconds(forward_calls(0, sequence_parallel=split))
        self.tensor_again_s = seconds(again_calls(self.layers, sequence_parallel=split))
        self.tensor_hidden_s = seconds(regather_calls(self.layers, sequence_parallel=split))

    def _ends(self) -> float:
        """Of the embedding and the loss, what the slowest pipeline rank has: balanced cuts may leave it neither."""
        if self.layout.pipeline == 1:
            return 1.0
        return 0.5 if self.layers in (self.counts[0], self.counts[-1]) else 0.0

    def _sync(self) -> _Sync:
        """Weights and gradients over data and context ranks, in one collective per layer."""
        layout, workload = self.layout, self.costs.workload
        ranks = layout.data * layout.context // layout.copies
        group = self.costs.group(layout.tensor, ranks)
        expert_group = self.costs.group(layout.tensor * layout.expert, max(1, ranks // layout.expert))
        calls = self.layers + 1
        width = workload.weight_bytes
        reduced = 4 if workload.has_masters else width

        def all_layers(bytes_each: int) -> float:
            dense = group.all_gather_s(self.dense * bytes_each / calls)
            routed = expert_group.all_gather_s(self.experts * bytes_each / calls) if self.experts else 0.0
            return calls * (dense + routed)

        summed = group.all_reduce_s(self.dense * width / calls)
        summed += expert_group.all_reduce_s(self.experts * width / calls) if self.experts else 0.0
        held_s = (self.dense + self.experts) / self.costs.rates.bytes_s
        return _Sync(
            all_layers(width), all_layers(reduced), calls * summed, 2 * width * held_s, (width + reduced) * held_s
        )

    def step(self, levers: Levers) -> StepTime:
        """One optimizer step with `levers`."""
        layout, micro = self.layout, self.micro_batches
        recompute, levels = self._recompute(levers)
        again = sum(share for _, share in levels)
        forward, backward = self._compute(levers)
        update = self._optimizer_s(levers)
        launched = 0.0 if levers.update_in_backward else self.launches.update_s(levers, wide=self.wide)
        waits = self._waits_s(levers, levels, forward, backward, recompute, update)
        whole_forward = forward + self.tensor_s + self.expert_s + self.context_forward_s
        regathered = _exposed((1 - again) * self.tensor_hidden_s, backward, 2 * self.layers)
        whole_backward = backward + self.tensor_s + regathered + self.expert_s + self.context_backward_s
        sends = 2 * self.send_s
        idle = bubble_s(
            layout.schedule, layout.pipeline, layout.stages_per_rank, whole_forward + sends, whole_backward,
            recompute + waits,
        )  # fmt: skip
        hides = whole_backward + recompute + waits
        return StepTime(
            compute_s=micro * (forward + backward),
            recompute_s=micro * recompute,
            launch_s=micro * waits,
            tensor_s=micro * (2 * self.tensor_s + regathered + again * self.tensor_again_s),
            context_s=micro * ((1 + again) * self.context_forward_s + self.context_backward_s),
            expert_s=micro * (2 + again) * self.expert_s,
            data_s=self._data_s(levers, whole_forward, hides),
            pipeline_s=micro * sends,
            bubble_s=idle,
            offload_s=self._offload_s(levers, again, whole_forward, hides),
            optimizer_s=max(update, launched),
        )

    def _compute(self, levers: Levers) -> tuple[float, float]:
        """The card's seconds of forward and backward, as products in fp8, tiles and the plain loss change them."""
        costs = self.costs
        narrow_forward, narrow_backward = fp8_s(
            costs.machine, costs.efficiency, costs.workload.spec, levers, self.time, self.tokens
        )
        tiled_forward, tiled_backward = tiled_s(self.time, levers.tiles, costs.rates.product_s)
        forward = self.forward_s + self.layers * (narrow_forward + tiled_forward)
        backward = self.backward_s + self.layers * (narrow_backward + tiled_backward)
        return forward, backward + (self.time.plain_loss_s if levers.loss == "plain" else 0.0)

    def _waits_s(
        self, levers: Levers, levels: Shares, forward: float, backward: float, again: float, update: float
    ) -> float:
        """What a micro-batch waits for the host, which is ahead of the card or behind it.

        It waits itself where forward is over, if backward is to update weights: the card then waits for a layer.
        """
        host_forward, host_backward = self.launches.pass_s(levers, levels)
        late = max(0.0, host_forward - forward)
        if levers.update_in_backward:
            return late + max(host_backward / self.layers, host_backward - backward - again - update)
        return max(late, host_forward + host_backward - forward - backward - again)

    def _recompute(self, levers: Levers) -> tuple[float, Shares]:
        """Seconds of forward computed again per micro-batch, and what share of the layers keeps how little for it."""
        if not is_checkpointed(levers):
            return 0.0, ()
        shares: Shares
        if levers.checkpoint_budget_bytes is None and not levers.num_checkpoints:
            recomputed = math.ceil(self.layers / levers.checkpoint_every) / self.layers
            shares = ((levers.checkpoint_keep, recomputed),)
        else:
            workload = self.costs.workload
            levels = layer_levels(workload.spec, levers, share_of(workload, self.layout, levers), 0, self.layers)
            shares = tuple((level, levels.count(level) / len(levels)) for level in set(levels) - {"everything"})
        tiled = levers.tiles > 1
        return self.layers * sum(share * self._again_s(level, tiled) for level, share in shares), shares

    def _again_s(self, level: Level, tiled: bool) -> float:
        """Of one layer that keeps so much: all but its last product (kernels/recomputation.py); in tiles, no more than
        what comes before attention, as the rest is computed again by tiles anyway."""
        time, spec = self.time, self.costs.workload.spec
        if level == "everything":
            return 0.0
        skips = tiled or (spec.gated and not spec.sandwich_norms and spec.experts is None and self.layout.tensor == 1)
        passes = time.norms_s + time.rope_s + (0.0 if skips else time.gate_s)
        if level == "matmuls":
            return passes
        products = time.projections_s
        if not tiled:
            products += time.output_s + time.inner_s + (0.0 if skips else time.down_s)
        return products + passes + (time.attention_forward_s if level == "nothing" else 0.0)

    def _data_s(self, levers: Levers, forward_s: float, backward_s: float) -> float:
        """Exposed traffic of a step; parallel/data.py says what each stage gathers and reduces, and when."""
        layout, sync, calls = self.layout, self.sync, self.layers + 1
        if layout.data * layout.context == 1:
            return 0.0
        gathered = _exposed(sync.gather_s, forward_s, calls)
        reduced = sync.pack_s + _exposed(sync.reduce_s, backward_s, calls)
        between = self._between_s()
        match layout.zero:
            case 0:  # pipelines add gradients up after their last micro-batch (parallel/pipeline.py)
                return sync.all_reduce_s if layout.pipeline > 1 else _exposed(sync.all_reduce_s, backward_s, calls)
            case 1:
                return gathered + sync.unpack_s + reduced + between
            case 2:
                return gathered + sync.unpack_s + self.micro_batches * reduced + between
        again = 1 - self.root_share  # the root's stay gathered
        both = _exposed(again * sync.gather_s + sync.reduce_s, backward_s, calls)
        return self.micro_batches * (gathered + both + (1 + again) * sync.unpack_s + sync.pack_s) + between

    def _between_s(self) -> float:
        """Once a step, groups that each hold a copy add up their shards of the gradients; taken to be in nobody's
        shadow."""
        layout, workload = self.layout, self.costs.workload
        group = self.costs.group(layout.tensor * layout.context * max(1, layout.shard_inside), layout.copies)
        return group.all_reduce_s(self.own_params * (4 if workload.has_masters else workload.weight_bytes))

    def _offload_s(self, levers: Levers, again: float, forward_s: float, backward_s: float) -> float:
        """Copies over the host link that compute does not hide."""
        if levers.offload == "none" and not levers.offload_checkpoints:
            return 0.0
        checkpoints = again * self.layers * self.checkpoint_bytes
        if levers.checkpoint_host_bytes is not None:
            checkpoints = min(checkpoints, levers.checkpoint_host_bytes)
        return self.offload.exposed_s(levers, checkpoints, forward_s, backward_s)

    def _optimizer_s(self, levers: Levers) -> float:
        """The card's seconds of AdamW and of adding up gradients (update_time.py)."""
        workload, layout = self.costs.workload, self.layout
        summed = self.own_params if layout.zero >= 2 else self.dense + self.experts
        added = (self.micro_batches - 1) * summed * added_bytes(workload, layout)
        moved = self.own_params * moved_bytes(workload, layout, levers)
        reached = update_share(levers, self.costs.efficiency, wide=self.wide)
        return (added + moved / reached) / self.costs.rates.bytes_s


def _exposed(traffic_s: float, compute_s: float, calls: int) -> float:
    """What compute does not hide, never less than one of the `calls`: nothing runs beside the first or the last.

    What it does hide slows it: NCCL's kernels take their share of the card.
    """
    exposed = max(traffic_s - compute_s, traffic_s / calls)
    return exposed + CONTENTION * (traffic_s - exposed)
