"""Traffic of data ranks: all-gather of weights and reduction of gradients, one collective per layer (parallel/data.py).

| ZeRO stage | a step gathers | and reduces | overlaps with |
|---|---|---|---|
| DDP | nothing | all-reduces 16-bit gradients once | the last backward |
| DDP of a pipeline | nothing | the same, after its last micro-batch | nothing |
| ZeRO-1 | weights once | gradients once, as float32 | forward; the last backward |
| ZeRO-2 | weights once | gradients with every micro-batch | forward; each backward |
| ZeRO-3 | weights twice with every micro-batch | gradients with every micro-batch | each forward and backward |

FSDP2 copies gathered weights out of the all-gather buffer on the compute stream (`unpack_s`), and casts gradients to
float32 into the reduce-scatter buffer (`pack_s`). ZeRO-3 keeps the root (embedding and head) gathered between passes.
Hybrid sharding (`shard_inside`): an all-reduce of shards over the copies once a step, assumed to overlap with nothing.
"""

from collections.abc import Callable

from tightfit.jobs.layout import Layout
from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.plan.seconds.cost_context import CostContext
from tightfit.plan.seconds.groups import Group
from tightfit.plan.seconds.parameters import RankParams
from tightfit.plan.seconds.passes import exposed_s


class DataTraffic:
    """Seconds of each kind of collective over all parameters of a rank."""

    def __init__(self, ctx: CostContext, layout: Layout, params: RankParams, *, layers: int) -> None:
        """A rank with `layers` layers."""
        workload, shards = ctx.workload, layout.zero_ranks
        engine, weight_bytes = workload.engine, workload.weight_bytes
        dense_group = ctx.group(layout.tensor, shards)
        expert_group = ctx.group(layout.tensor * layout.expert, max(1, shards // layout.expert))
        copies_group = ctx.group(layout.ranks // layout.pipeline // layout.zero_groups, layout.zero_groups)
        reduced_bytes = FLOAT32_BYTES if workload.has_masters and engine.reduces_wide else weight_bytes
        self.layout, self.params, self.overlaps_gradients = layout, params, engine.overlaps_gradients
        calls = layers + 1
        if engine.bucket_bytes is not None:
            calls = max(1, round(params.all * reduced_bytes / engine.bucket_bytes))
        self.calls = calls

        def collectives_s(one_s: Callable[[Group, float], float], bytes_each: int) -> float:
            dense_s = one_s(dense_group, params.dense * bytes_each / calls)
            experts_s = one_s(expert_group, params.experts * bytes_each / calls) if params.experts else 0.0
            return calls * (dense_s + experts_s)

        summed_bytes = weight_bytes if engine.overlaps_gradients else reduced_bytes
        self.gather_s = collectives_s(Group.all_gather_s, weight_bytes)
        self.reduce_s = collectives_s(Group.all_gather_s, reduced_bytes)  # a reduce-scatter takes as long
        self.all_reduce_s = collectives_s(Group.all_reduce_s, summed_bytes)
        byte_each_s = params.all / ctx.rates.bytes_s
        self.unpack_s = 2 * weight_bytes * byte_each_s
        """Seconds to copy gathered weights out of the all-gather buffer (compute stream)."""
        self.pack_s = (weight_bytes + reduced_bytes) * byte_each_s
        """Seconds to cast gradients to fp32 into the reduce-scatter buffer (communication stream)."""
        self.between_copies_s = copies_group.all_reduce_s(params.owned * reduced_bytes)

    def step_s(self, *, micro_batches: int, forward_s: float, backward_s: float) -> float:
        """Exposed seconds of a step whose micro-batches take `forward_s` and `backward_s`."""
        layout = self.layout
        if layout.gradient_ranks == 1:
            return 0.0
        if not self.overlaps_gradients:
            return self._alone_s(micro_batches)
        if layout.zero == 0:
            return self.all_reduce_s if layout.pipeline > 1 else exposed_s(self.all_reduce_s, backward_s, self.calls)
        gathered_s = exposed_s(self.gather_s, forward_s, self.calls)
        reduced_s = self.pack_s + exposed_s(self.reduce_s, backward_s, self.calls)
        if layout.zero < 3:
            reductions = 1 if layout.zero == 1 else micro_batches
            return gathered_s + self.unpack_s + reductions * reduced_s + self.between_copies_s
        again = 1 - self.params.root_share  # gathered for backward once more
        both_s = exposed_s(again * self.gather_s + self.reduce_s, backward_s, self.calls)
        each_s = gathered_s + both_s + (1 + again) * self.unpack_s + self.pack_s
        return micro_batches * each_s + self.between_copies_s

    def _alone_s(self, micro_batches: int) -> float:
        """Seconds of a step for an engine without overlap: reductions after backward, all-gathers before forward."""
        if self.layout.zero == 0:
            return self.all_reduce_s
        reductions = 1 if self.layout.zero == 1 else micro_batches
        gathers = 2 * micro_batches if self.layout.zero == 3 else 1
        return gathers * self.gather_s + reductions * self.reduce_s + self.between_copies_s
