"""Cost: how long one optimizer step takes, for a layout and levers on a machine.

    step = M × (forward + backward + recompute + traffic that compute does not hide) + bubble + gradients + optimizer

M micro-batches run through the slowest pipeline rank. Compute is matrix products, attention and memory-bound kernels
at the measured shares of the card's rates (hardware/efficiency.py), never less than the host needs to launch it. Tensor
and expert collectives wait in line; what context ranks hand on hides behind attention (ring.py), gathered weights and
reduced gradients behind the layers (all but one layer's), copies to the host behind both. What ZeRO stages send is
parallel/data.py's table. Not modelled: stragglers, data loading.

`Costs` belongs to one workload and machine and does what depends on the layout once (`frame`), so that a search can
try many levers on it (`Frame.step`).
"""

import math
from dataclasses import dataclass

from tightfit.hardware.efficiency import MEASURED, Efficiency
from tightfit.hardware.machine import Machine
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.state_format import is_torch_adamw, moment_bytes, state_format
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.keeping import Level, layer_levels
from tightfit.memory.formulas.pipeline import layer_counts
from tightfit.memory.formulas.share import share_of
from tightfit.memory.formulas.states import IN_FLIGHT_BYTES, kept_weights
from tightfit.plan.bubble import bubble_s
from tightfit.plan.communication import Group, make_group
from tightfit.plan.layer_time import LayerTime, card_rates, layer_time
from tightfit.plan.ring import Ring
from tightfit.plan.steptime import StepTime
from tightfit.plan.traffic import TensorCalls, again_calls, forward_calls, regather_calls
from tightfit.plan.work import layer_work, sharded_params

CONTENTION = 16 / 132
"""Of an H100's multiprocessors, those that NCCL's kernels take (one per channel) from the compute they hide behind."""


FP8_SHARE = 0.7
"""Of fp8's rate over bf16's, what is left once tensors have been scaled and cast; assumed, not measured yet."""


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


class Frame:
    """The parts of a step that depend on the layout alone; `step` adds what levers change."""

    def __init__(self, costs: Costs, layout: Layout) -> None:
        self.costs, self.layout = costs, layout
        workload, spec = costs.workload, costs.workload.spec
        self.micro_batches = workload.global_batch // (layout.micro_batch * layout.data)
        self.counts = layer_counts(spec, workload.sequence_length, layout.pipeline, layout.stages_per_rank)
        self.layers = max(self.counts)
        self.time = costs.layer(layout)
        self._count_params()
        self._count_compute()
        self._count_collectives()
        self.sync = self._sync()

    def _count_params(self) -> None:
        """Parameters of the fullest rank, dense ones and experts, and what is left of them after sharding."""
        layout, spec = self.layout, self.costs.workload.spec
        dense, experts, ends = sharded_params(spec)
        if layout.pipeline > 1:
            ends = max(spec.embedding_params, spec.vocab_size * spec.hidden_size)
        self.dense = (dense * self.layers + ends) / layout.tensor
        self.experts = experts * self.layers / layout.tensor / layout.expert
        shards = layout.data * layout.context // layout.copies if layout.zero else 1
        self.own_params = self.dense / shards + self.experts / (max(1, shards // layout.expert) if layout.zero else 1)

    def _count_compute(self) -> None:
        """Forward and backward of one micro-batch on the slowest pipeline rank."""
        time, last = self.time, self.counts[-1]
        self.forward_s = max(self.layers * time.forward_s, last * time.forward_s + time.head_forward_s)
        self.backward_s = max(self.layers * time.backward_s, last * time.backward_s + time.head_backward_s)
        launch = self.layers * self.costs.efficiency.layer_launch_s
        self.forward_launch_s = launch * self.costs.efficiency.forward_launch_share
        self.backward_launch_s = launch - self.forward_launch_s

    def _count_collectives(self) -> None:
        """What tensor, context, expert and pipeline ranks exchange for one micro-batch, one way."""
        layout, workload, costs = self.layout, self.costs.workload, self.costs
        spec, width = workload.spec, workload.weight_bytes
        tokens = layout.micro_batch * workload.sequence_length / layout.context
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
        return _Sync(all_layers(width), all_layers(reduced), calls * summed)

    def step(self, levers: Levers) -> StepTime:
        """One optimizer step with `levers`."""
        layout, micro = self.layout, self.micro_batches
        recompute, again = self._recompute(levers)
        plain = self.time.plain_loss_s if levers.loss == "plain" else 0.0
        saved = self._saved_by_fp8(levers)
        forward = max(self.forward_s - saved, self.forward_launch_s)
        backward = max(self.backward_s - 2 * saved + plain, self.backward_launch_s)
        whole_forward = forward + self.tensor_s + self.expert_s + self.context_forward_s
        regathered = _exposed((1 - again) * self.tensor_hidden_s, backward, 2 * self.layers)
        whole_backward = backward + self.tensor_s + regathered + self.expert_s + self.context_backward_s
        sends = 2 * self.send_s
        idle = bubble_s(
            layout.schedule, layout.pipeline, layout.stages_per_rank, whole_forward + sends, whole_backward, recompute
        )
        return StepTime(
            compute_s=micro * (forward + backward),
            recompute_s=micro * recompute,
            tensor_s=micro * (2 * self.tensor_s + regathered + again * self.tensor_again_s),
            context_s=micro * ((1 + again) * self.context_forward_s + self.context_backward_s),
            expert_s=micro * (2 + again) * self.expert_s,
            data_s=self._data_s(levers, whole_forward, whole_backward + recompute),
            pipeline_s=micro * sends,
            bubble_s=idle,
            offload_s=self._offload_s(levers, whole_forward, whole_backward + recompute),
            optimizer_s=self._optimizer_s(levers),
        )

    def _saved_by_fp8(self, levers: Levers) -> float:
        """Seconds of a forward pass that layers' products in fp8 save."""
        rates = self.costs.machine.accelerator.rates
        if levers.matmul == "native" or not rates.fp8 or not rates.bf16:
            return 0.0
        return self.layers * self.time.matmul_s * max(0.0, 1 - rates.bf16 / (rates.fp8 * FP8_SHARE))

    def _recompute(self, levers: Levers) -> tuple[float, float]:
        """Seconds of forward computed again per micro-batch, and the share of layers that is."""
        if (
            levers.checkpoint_budget_bytes is None
            and levers.checkpoint_keep == "nothing"
            and not levers.num_checkpoints
        ):
            share = math.ceil(self.layers / levers.checkpoint_every) / self.layers if levers.checkpoint_every else 0.0
            again = share * self.layers * self.time.forward_s
        else:
            levels = self._levels(levers)
            share = sum(level != "everything" for level in levels) / len(levels)
            again = self.layers * sum(self._again_s(level) for level in levels) / len(levels)
        if levers.tiles > 1:
            again += (1 - share) * self.layers * self.time.mlp_forward_s
        return max(again, share * self.forward_launch_s), share

    def _levels(self, levers: Levers) -> tuple[Level, ...]:
        """What each layer of the first pipeline rank keeps."""
        workload = self.costs.workload
        return layer_levels(workload.spec, levers, share_of(workload, self.layout, levers), 0, self.layers)

    def _again_s(self, level: Level) -> float:
        """Of one layer that keeps so much."""
        time = self.time
        return {
            "nothing": time.forward_s,
            "attention": time.forward_s - time.attention_forward_s,
            "matmuls": time.passes_s,
            "everything": 0.0,
        }[level]

    def _data_s(self, levers: Levers, forward_s: float, backward_s: float) -> float:
        """Exposed traffic of a step; parallel/data.py says what each stage gathers and reduces, and when."""
        layout, sync, calls = self.layout, self.sync, self.layers + 1
        if layout.data * layout.context == 1:
            return 0.0
        gathered = _exposed(sync.gather_s, forward_s, calls)
        reduced = _exposed(sync.reduce_s, backward_s, calls)
        between = self._between_s()
        match layout.zero:
            case 0:
                return _exposed(sync.all_reduce_s, backward_s, calls)
            case 1:
                return gathered + reduced + between
            case 2:
                return gathered + self.micro_batches * reduced + between
        both = _exposed(sync.gather_s + sync.reduce_s, backward_s, calls)
        return self.micro_batches * (gathered + both) + between

    def _between_s(self) -> float:
        """Once a step, groups that each hold a copy add up their shards of the gradients; taken to be in nobody's
        shadow."""
        layout, workload = self.layout, self.costs.workload
        group = self.costs.group(layout.tensor * layout.context * max(1, layout.shard_inside), layout.copies)
        return group.all_reduce_s(self.own_params * (4 if workload.has_masters else workload.weight_bytes))

    def _offload_s(self, levers: Levers, forward_s: float, backward_s: float) -> float:
        """Copies over the host link that compute does not hide; both ways run at once.

        Checkpoints go out in forward and return in backward, weights come before each. States pass in backward where
        weights are updated there, but for the late ones; these, or else all of them, in the next step's first forward.
        """
        if levers.offload == "none" and not levers.offload_checkpoints:
            return 0.0
        out_forward, in_forward, in_backward = self._streams_s(levers)
        plain = max(0.0, max(out_forward, in_forward) - forward_s) + max(0.0, in_backward - backward_s)
        if levers.offload == "none":
            return self.micro_batches * plain
        states = self._states_s(levers)
        late = states * (self._late_share(levers) if levers.update_in_backward else 1.0)
        once = max(0.0, max(out_forward, in_forward + late) - forward_s)
        once += max(0.0, in_backward + states - late - backward_s)
        return (self.micro_batches - 1) * plain + once

    def _streams_s(self, levers: Levers) -> tuple[float, float, float]:
        """Link seconds of one micro-batch: out and in while forward runs, in while backward does."""
        workload, link = self.costs.workload, self.costs.machine.accelerator.host.copy_bytes_s
        out_forward = in_forward = in_backward = 0.0
        if levers.offload_checkpoints:
            recomputed = self._recompute(levers)[1] * self.layers
            if levers.checkpoint_host_bytes is not None:
                recomputed = min(recomputed, levers.checkpoint_host_bytes / self.checkpoint_bytes)
            out_forward = in_backward = recomputed * self.checkpoint_bytes / link
        if levers.offload == "weights":
            each = 4 if workload.has_masters else workload.weight_bytes
            fetched = self.own_params * self._away_share(levers) * each / link
            in_forward, in_backward = fetched, in_backward + fetched
        return out_forward, in_forward, in_backward

    def _states_s(self, levers: Levers) -> float:
        """Link seconds of a step's states one way, or the time the host takes where it updates them."""
        workload, machine = self.costs.workload, self.costs.machine
        away, link = self.own_params * self._away_share(levers), machine.accelerator.host.copy_bytes_s
        passing = away * self._passing_bytes(levers) / link
        gradients = away * 4 / link
        ranks = min(machine.per_node, self.layout.ranks)
        on_host = max(gradients, away * ranks / self.costs.efficiency.host_adam_params_s)
        wide = workload.has_masters and state_format(levers, wide=True) == "fp32"
        if levers.offload_update == "gpu" or not wide:
            return passing
        return on_host if levers.offload_update == "host" else min(passing, on_host)

    def _passing_bytes(self, levers: Levers) -> float:
        """Of one weight, each way: moments, and the master or a weight that is away as well."""
        workload = self.costs.workload
        updated = 4 if workload.has_masters else workload.weight_bytes if levers.offload == "weights" else 0
        return moment_bytes(levers, wide=workload.updates_wide) + updated

    def _away_share(self, levers: Levers) -> float:
        """Of this rank's weights, those whose belongings are on the host."""
        masters = 4 if self.costs.workload.has_masters else 0
        kept = moment_bytes(levers, wide=self.costs.workload.updates_wide) + masters
        kept += self.costs.workload.weight_bytes if levers.offload == "weights" else 0
        count = int(self.own_params)
        return 1 - kept_weights(self.costs.workload, self.layout, levers, count, kept)[1] / count

    def _late_share(self, levers: Levers) -> float:
        """Of updates inside backward, those that are put off until it is over."""
        late = max(0, levers.offload_gradient_bytes - IN_FLIGHT_BYTES)
        return min(1.0, late / (self.own_params * self.costs.workload.weight_bytes))

    def _optimizer_s(self, levers: Levers) -> float:
        """Bytes that AdamW and the adding of gradients move, at the card's bandwidth.

        As train/optimizer.py goes about it: gradients are read for their norm; beside masters they are widened (read
        and written), and the weights narrowed after (read and written); the update reads and writes gradients (scaled
        in it), what it updates, and both moments. Shards are masters already, and nothing is widened or narrowed.
        Updates inside backward or of states on the host move less, but run beside other work: counted as much.
        """
        workload, width = self.costs.workload, self.costs.workload.weight_bytes
        kept = 4 if workload.has_masters and self.layout.zero else width
        summed = self.own_params if self.layout.zero >= 2 else self.dense + self.experts
        added = (self.micro_batches - 1) * summed * (width + 2 * kept)
        updated = 4 if workload.has_masters else width
        copies = workload.has_masters and not self.layout.zero
        moved = kept + (2 * (width + 4) if copies else 0) + 4 * updated
        stays = levers.offload == "none" and not levers.update_in_backward
        if stays and not is_torch_adamw(levers, wide=workload.updates_wide):
            moved = 2 * kept + (width if copies else 0) + 2 * updated  # gradients are read as they are, written nowhere
        moments = moment_bytes(levers, wide=workload.updates_wide)
        return (added + self.own_params * (moved + 2 * moments)) / self.costs.rates.bytes_s


def _exposed(traffic_s: float, compute_s: float, calls: int) -> float:
    """What compute does not hide, never less than one of the `calls`: nothing runs beside the first or the last.

    What it does hide slows it: NCCL's kernels take their share of the card.
    """
    exposed = max(traffic_s - compute_s, traffic_s / calls)
    return exposed + CONTENTION * (traffic_s - exposed)
