"""Cost: how long one optimizer step takes, for a layout and levers on a machine.

    step = M × (forward + backward + recompute + launches and traffic that compute does not hide)
           + bubble + gradients + optimizer

M micro-batches run through the slowest pipeline rank. Each cause has its file in plan/seconds; here they are added up:

| what | overlaps with |
|---|---|
| products, attention, elementwise kernels, recompute | nothing: they are the card's own work |
| launches | the card's work, as far as the host is ahead of it |
| tensor and expert collectives, sends of a pipeline | nothing: compute waits for them |
| gathering a block's input again for backward | backward, all but one block's |
| all-to-all of heads between context ranks | nothing (seconds/context.py) |
| keys and values in a ring of context ranks | attention (seconds/context.py) |
| all-gather of weights, reduction of gradients | forward and backward, all but one layer's (seconds/data.py) |
| a teacher's forward pass | nothing |
| copies to and from the host | forward and backward (seconds/offload.py) |

Synchronous cards wait for the slowest of them (seconds/stragglers.py). Not modelled: data loading. `Costs` belongs to
one workload and machine; `Costs.layout_cost` computes once what depends on the layout alone, so that a search can
try many levers on it (`LayoutCost.step`).
"""

from collections.abc import Sequence
from functools import cache, partial
from operator import attrgetter

from tightfit.hardware.efficiency import MEASURED
from tightfit.hardware.launches import GAP_SHARE, REPLAY_MS, REST, SLOW_HOST, STEP_IDLE_MS
from tightfit.hardware.machine import Machine
from tightfit.jobs.layout import SPLITS, Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.cuda_graph import may_capture
from tightfit.jobs.state_format import is_torch_adamw
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.pipeline import layer_counts
from tightfit.plan.seconds.adapter import adapter_launch, adapter_params
from tightfit.plan.seconds.context import context_ring, head_exchange_s
from tightfit.plan.seconds.data import DataTraffic
from tightfit.plan.seconds.expert import expert_one_way_s
from tightfit.plan.seconds.fp8 import fp8_more_s
from tightfit.plan.seconds.groups import Group
from tightfit.plan.seconds.launches import host_share, late_update_launch_s, launch_s, update_launch_s
from tightfit.plan.seconds.layer import LayerTime
from tightfit.plan.seconds.long_kernels import long_kernels
from tightfit.plan.seconds.offload import OffloadTime
from tightfit.plan.seconds.optimizer import update_s
from tightfit.plan.seconds.parameters import RankParams, model_params, rank_params
from tightfit.plan.seconds.passes import PassSeconds, exposed_s
from tightfit.plan.seconds.pipeline import bubble_s
from tightfit.plan.seconds.rates import card_rates
from tightfit.plan.seconds.recompute import Recompute, recompute
from tightfit.plan.seconds.stragglers import straggler_share
from tightfit.plan.seconds.teacher import teacher_s
from tightfit.plan.seconds.tensor import TensorTraffic, tensor_traffic
from tightfit.plan.seconds.tensor_mesh import MeshMessages, mesh_traffic
from tightfit.plan.seconds.tiles import tiled_more_s
from tightfit.plan.steptime import StepTime

states_key = attrgetter(
    "data", "zero", "shard_inside", "tensor_mesh", "tensor_depth", "stages_per_rank", "in_v", *SPLITS
)
"""Cache key: the fields of a Layout on which a rank's weights and states depend."""
tokens_key = attrgetter("micro_batch", "sequence_parallel", "tensor", "ulysses_ranks", "ring")
"""Cache key: the fields of a Layout on which a layer's time depends."""


class Costs:
    """Step times of one workload on one machine."""

    def __init__(self, workload: Workload, machine: Machine, *, layer_launch_ms: float | None = None) -> None:
        """`layer_launch_ms`: the host's measured time to launch a plain layer and its update; None: the default's."""
        self.workload, self.machine, self.efficiency = workload, machine, MEASURED
        if (calibration := machine.calibration) is not None:
            self.efficiency = calibration.efficiency(machine.accelerator)
            layer_launch_ms = calibration.layer_launch_ms
        self.host_share = host_share(layer_launch_ms)
        self.launch_share = workload.engine.launch_share * self.host_share
        self.rates = card_rates(workload, machine, self.efficiency)
        self.group = cache(partial(Group, machine))
        """From (stride, size) to the Group of ranks."""
        self.layout_cost = cache(partial(LayoutCost, self))
        """From a Layout to its LayoutCost."""
        self._layers: dict[object, LayerTime] = {}
        self._data: dict[object, tuple[RankParams, DataTraffic]] = {}

    def layer(self, layout: Layout) -> LayerTime:
        """Seconds of one layer under `layout`."""
        key = tokens_key(layout)
        if key not in self._layers:
            self._layers[key] = LayerTime(self.workload, self.rates, layout)
        return self._layers[key]

    def data(self, layout: Layout, layers: int) -> tuple[RankParams, DataTraffic]:
        """Parameters of a rank with `layers` layers, and data ranks' collectives over them."""
        key = (states_key(layout), layers)
        if key not in self._data:
            adapted = self.workload.adapted
            params = rank_params(self.workload.spec, layout, layers)
            params = params if adapted is None else adapter_params(adapted, self.workload)
            bytes_s = self.rates.bytes_s
            traffic = DataTraffic(self.group, self.workload, layout, params, layers=layers, bytes_s=bytes_s)
            self._data[key] = params, traffic
        return self._data[key]

    def step(self, layout: Layout, levers: Levers) -> StepTime:
        """One optimizer step."""
        return self.layout_cost(layout).step(levers)


class LayoutCost:
    """The parts of a step's time that depend on the layout alone; `step` adds what levers change."""

    def __init__(self, costs: Costs, layout: Layout) -> None:
        workload, spec, tensor = costs.workload, costs.workload.spec, layout.tensor
        self.costs, self.layout = costs, layout
        self.step = cache(self._step)
        self.micro_batches = workload.global_batch // (layout.micro_batch * layout.data)
        length = workload.sequence_length
        counts = layer_counts(spec, length, layout.pipeline, layout.stages_per_rank, in_v=layout.in_v)
        layers_with_head = counts[0 if layout.in_v else -1]
        self.layers = max(counts)
        self.layer = layer = costs.layer(layout)
        self.params, self.data = costs.data(layout, self.layers)
        self.teacher_s = teacher_s(workload, costs.machine, costs.rates, layout)

        # The slowest pipeline rank has most layers, or the last ones and the head.
        with_head_forward_s = layers_with_head * layer.forward_s + layer.head_forward_s
        with_head_backward_s = layers_with_head * layer.backward_s + layer.head_backward_s
        self.forward_s = max(self.layers * layer.forward_s, with_head_forward_s)
        self.backward_s = max(self.layers * layer.backward_s, with_head_backward_s)

        hidden_bytes = layer.tokens * spec.hidden_size * workload.weight_bytes
        splits_stream = layout.sequence_parallel or layout.tensor_mesh != "1d"
        self.stream_bytes = hidden_bytes / (tensor if splits_stream else 1)
        self.tensor = self._tensor_traffic(counts, hidden_bytes)
        context = {"tokens": layer.tokens, "bytes_s": costs.rates.bytes_s}
        exchange_s = head_exchange_s(costs.group, workload, layout, **context)
        ring = context_ring(costs.group, workload, layout, **context)
        self.context_forward_s = self.layers * (exchange_s + ring.forward_s(layer.attention.forward_s))
        self.context_backward_s = self.layers * (exchange_s + ring.backward_s(layer.attention.backward_s))
        experts = costs.group(tensor, layout.expert)
        routed_bytes = self.stream_bytes if workload.engine.routes_split_tokens else hidden_bytes
        sent_s = expert_one_way_s(experts, spec, layers=self.layers, hidden_bytes=routed_bytes)
        self.expert_s = (1 - workload.engine.expert_hidden_share) * sent_s
        stages = costs.group(tensor * layout.gradient_ranks, layout.pipeline)
        self.send_s = layout.stages_per_rank * stages.send_s(self.stream_bytes)
        if workload.engine.overlaps_sends:
            self.send_s /= layout.stages_per_rank  # the first of a micro-batch's only
        self.offload = OffloadTime(
            workload=workload,
            machine=costs.machine,
            layout=layout,
            efficiency=costs.efficiency,
            params=self.params,
            micro_batches=self.micro_batches,
        )

    def _tensor_traffic(self, counts: Sequence[int], hidden_bytes: float) -> TensorTraffic:
        """Traffic of tensor ranks in a line or on a mesh."""
        costs, layout, workload = self.costs, self.layout, self.costs.workload
        if layout.tensor_mesh == "1d":
            return tensor_traffic(costs.group(1, layout.tensor), layout, counts, hidden_bytes)
        messages = MeshMessages(workload.spec, layout, self.layer.tokens)
        return mesh_traffic(
            costs.group,
            layout,
            messages,
            counts,
            params=self.params.dense,
            number_bytes=workload.weight_bytes,
            bytes_s=costs.rates.bytes_s,
        )

    def _step(self, levers: Levers) -> StepTime:
        """One optimizer step with `levers`."""
        layout, micro, costs = self.layout, self.micro_batches, self.costs

        # One micro-batch: the card's own work, and its waits for the host's launches.
        compute = self._compute(levers)
        again = recompute(costs.workload, layout, levers, self.layer, self.layers)
        update_s = self._update_s(levers)
        launches = self._replay() if self.is_captured(levers) else self._launches(levers, again, costs.launch_share)
        card = PassSeconds(compute.forward_s, compute.backward_s + again.seconds)
        waits = self._waits(levers, launches, card, update_s)

        # Its collectives that compute waits for.
        regather_s = exposed_s((1 - again.share) * self.tensor.regather_s, compute.backward_s, 2 * self.layers)
        whole = self._with_traffic(compute, regather_s)
        sends_s = 2 * self.send_s

        # The whole step, with traffic as far as these passes do not hide it.
        hiding_backward_s = whole.backward_s + again.seconds + waits.both_s
        reference_launches_s = self._launches(levers, again, costs.workload.engine.launch_share).both_s
        return StepTime(
            compute_s=micro * compute.both_s,
            recompute_s=micro * again.seconds,
            launch_s=max(micro * waits.both_s, self._idle_s(levers, micro * reference_launches_s)),
            tensor_s=self.tensor.once_s + micro * (self._exposed_tensor_s(again) + regather_s),
            context_s=micro * ((1 + again.share) * self.context_forward_s + self.context_backward_s),
            expert_s=micro * (2 + again.share / 2) * self.expert_s,  # recomputation sends tokens to experts, not back
            data_s=self.data.step_s(
                layout, micro_batches=micro, forward_s=whole.forward_s, backward_s=hiding_backward_s
            ),
            pipeline_s=micro * sends_s,
            bubble_s=bubble_s(
                layout,
                micro_batches=micro,
                forward_s=whole.forward_s + sends_s,
                backward_s=whole.backward_s,
                recompute_s=again.seconds + waits.both_s,
            ),
            offload_s=self.offload.step_s(
                levers,
                checkpoint_bytes=again.share * self.layers * self.stream_bytes,  # layers' inputs
                passes=PassSeconds(
                    whole.forward_s + waits.forward_s, whole.backward_s + again.seconds + waits.backward_s
                ),
                kernels=long_kernels(costs.workload.spec, self.layer, levers, again, self.layers),
                launches=launches,
                host_share=costs.host_share,
            ),
            optimizer_s=self._optimizer_s(levers, update_s),
            straggler_s=straggler_share(layout.ranks) * micro * (compute.both_s + again.seconds),
            teacher_s=micro * self.teacher_s,
        )

    def _with_traffic(self, compute: PassSeconds, regather_s: float) -> PassSeconds:
        """A micro-batch's passes with the collectives that compute waits for."""
        forward_s = compute.forward_s + self.tensor.one_way_s + self.expert_s + self.context_forward_s
        backward_s = compute.backward_s + self.tensor.one_way_s + regather_s + self.expert_s + self.context_backward_s
        return PassSeconds(forward_s, backward_s)

    def _exposed_tensor_s(self, again: Recompute) -> float:
        """Seconds of a micro-batch's tensor collectives, recomputed ones included, that the engine does not overlap."""
        collectives_s = 2 * self.tensor.one_way_s + again.share * self.tensor.recompute_s
        return (1 - self.costs.workload.engine.tensor_hidden_share) * collectives_s

    def _optimizer_s(self, levers: Levers, card_s: float) -> float:
        """The update: the card's seconds, or the host's for launching it if longer and nothing else is queued.

        With updates inside backward, matrices are updated there; after it the card waits for the launches of the
        remaining updates (norms and biases).
        """
        if levers.update_in_backward and self.is_captured(levers):
            return card_s
        if levers.update_in_backward:
            return card_s + self.costs.host_share * late_update_launch_s(self.costs.workload.spec, self.layers)
        return card_s if self._launches_update_before_loss(levers) else max(card_s, self._update_launch_s(levers))

    def _idle_s(self, levers: Levers, launches_s: float) -> float:
        """Idle seconds of a card though its host is ahead; 0 in a pipeline, whose ranks wait for each other instead."""
        if self.layout.pipeline > 1:
            return 0.0
        if levers.update_in_backward and self.is_captured(levers):  # no update runs while the host prepares a replay
            return GAP_SHARE * launches_s + self._replay().forward_s
        if self._launches_update_before_loss(levers) or self.is_captured(levers):
            return GAP_SHARE * launches_s
        return 1e-3 * self.costs.launch_share * STEP_IDLE_MS

    def _compute(self, levers: Levers) -> PassSeconds:
        """The card's seconds of forward and backward, with the changes by fp8 products, tiles and the plain loss."""
        costs, workload, tensor = self.costs, self.costs.workload, self.layout.tensor
        fp8 = fp8_more_s(workload, costs.machine, costs.efficiency, self.layer, levers, tensor=tensor)
        tiled = tiled_more_s(workload, costs.rates, self.layer, levers, tensor=tensor)
        plain = levers.loss == "plain" or workload.engine.passes.logits is not None
        plain_loss_s = self.layer.plain_loss_more_s if plain else 0.0
        return PassSeconds(
            self.forward_s + self.layers * (fp8.forward_s + tiled.forward_s),
            self.backward_s + self.layers * (fp8.backward_s + tiled.backward_s) + plain_loss_s,
        )

    def is_captured(self, levers: Levers) -> bool:
        """Whether forward and backward, with updates inside it, are launched as a CUDA graph: where it is possible and
        a slow host (SLOW_HOST × the launches) would take longer than the card."""
        workload = self.costs.workload
        if not (workload.engine.captures and may_capture(workload, self.layout, levers)):
            return False
        again = recompute(workload, self.layout, levers, self.layer, self.layers)
        host_s = self._launches(levers, again, workload.engine.launch_share).both_s
        card_s = self._compute(levers).both_s + again.seconds
        card_s += self._update_s(levers) if levers.update_in_backward else 0.0
        return levers.cuda_graph == "always" or SLOW_HOST * host_s > card_s

    def _replay(self) -> PassSeconds:
        """The host's seconds of replaying a CUDA graph of forward and backward."""
        return PassSeconds(forward_s=1e-3 * self.costs.launch_share * REPLAY_MS)

    def _launches(self, levers: Levers, again: Recompute, share: float) -> PassSeconds:
        """Seconds to launch a micro-batch's forward and backward, on a host that takes `share` of the measured time."""
        workload = self.costs.workload
        ours = launch_s(levers, again, self.layers, workload.spec, adapter_launch(workload))
        backwards = 2 if self.layout.splits_backward else 1  # autograd runs for inputs, then again for weights
        return PassSeconds(share * ours.forward_s, share * ours.backward_s * backwards)

    def _waits(self, levers: Levers, launches: PassSeconds, card: PassSeconds, update_s: float) -> PassSeconds:
        """Seconds that the card waits for the host's launches in a micro-batch's forward and in its backward.

        Where the host launches the update before it reads the loss, it launches the next forward while the card
        updates. With updates inside backward the host waits for the card at the end of forward, so that the card idles
        at least until the loss's backward is launched.
        """
        forward_s, host_backward_s = card.forward_s, launches.backward_s
        if self._launches_update_before_loss(levers):
            host_backward_s += self._update_launch_s(levers) / max(1, self.micro_batches)
            forward_s += update_s / max(1, self.micro_batches)
        forward_late_s = max(0.0, launches.forward_s - forward_s)
        if levers.update_in_backward and not self.is_captured(levers):
            began_s = 1e-3 * self.costs.launch_share * REST.backward_ms
            return PassSeconds(forward_late_s, max(began_s, host_backward_s - card.backward_s - update_s))
        late_s = launches.forward_s + host_backward_s - forward_s - card.backward_s
        return PassSeconds(forward_late_s, max(0.0, late_s - forward_late_s))

    def _launches_update_before_loss(self, levers: Levers) -> bool:
        """Whether the host launches the update before it reads the loss; torch's AdamW skips non-finite gradients by
        itself."""
        workload = self.costs.workload
        return workload.engine.launches_update_before_loss and is_torch_adamw(levers, wide=workload.updates_wide)

    def _update_s(self, levers: Levers) -> float:
        """The card's seconds of AdamW and of summing gradients over micro-batches."""
        costs = self.costs
        return update_s(
            costs.workload,
            self.layout,
            levers,
            self.params,
            costs.efficiency,
            micro_batches=self.micro_batches,
            bytes_s=costs.rates.bytes_s,
        )

    def _update_launch_s(self, levers: Levers) -> float:
        """The host's seconds of launching the update; 0 with updates inside backward, which launches.py counts."""
        if levers.update_in_backward:
            return 0.0
        workload, model = self.costs.workload, model_params(self.costs.workload.spec)
        return self.costs.host_share * update_launch_s(
            levers,
            workload.spec,
            wide=workload.updates_wide,
            layers=self.layers,
            layer_params=model.layer + model.layer_experts,
            ends=model.ends / self.layout.weight_ranks,
        )
