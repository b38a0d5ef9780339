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

from tightfit.hardware.machine import Machine
from tightfit.jobs.layout import SPLITS, Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.pipeline import layer_counts
from tightfit.plan.seconds.adapter import adapter_params
from tightfit.plan.seconds.context import layer_context_s
from tightfit.plan.seconds.cost_context import cost_context
from tightfit.plan.seconds.data import DataTraffic
from tightfit.plan.seconds.expert import expert_one_way_s
from tightfit.plan.seconds.fp8 import fp8_more_s
from tightfit.plan.seconds.launches import HostLaunches
from tightfit.plan.seconds.layer import LayerTime
from tightfit.plan.seconds.long_kernels import long_kernels
from tightfit.plan.seconds.offload import OffloadTime
from tightfit.plan.seconds.optimizer import update_s
from tightfit.plan.seconds.parameters import rank_params
from tightfit.plan.seconds.passes import PassSeconds, exposed_s
from tightfit.plan.seconds.pipeline import bubble_s
from tightfit.plan.seconds.recompute import recompute
from tightfit.plan.seconds.stragglers import straggler_share
from tightfit.plan.seconds.teacher import teacher_s
from tightfit.plan.seconds.tensor import TensorTraffic, tensor_traffic
from tightfit.plan.seconds.tensor_mesh import mesh_traffic
from tightfit.plan.seconds.tiles import tiled_more_s
from tightfit.plan.steptime import StepTime

states_key = attrgetter(
    "data", "zero", "shard_inside", "tensor_mesh", "tensor_depth", "stages_per_rank", "in_v", *SPLITS
)
"""Cache key: the fields of a Layout on which a rank's weights and states depend."""
tokens_key = attrgetter("micro_batch", "splits_stream", "tensor", "ulysses_ranks", "ring")
"""Cache key: the fields of a Layout on which a layer's time depends."""


class Costs:
    """Step times of one workload on one machine."""

    def __init__(self, workload: Workload, machine: Machine, *, layer_launch_ms: float | None = None) -> None:
        """`layer_launch_ms`: the host's measured time to launch a plain layer and its update; None: the default's."""
        self.ctx = cost_context(workload, machine, layer_launch_ms)
        self.layout_cost = cache(partial(LayoutCost, self))
        """From a Layout to its LayoutCost."""
        self._layers: dict[object, LayerTime] = {}
        self._data: dict[object, DataTraffic] = {}

    def layer(self, layout: Layout) -> LayerTime:
        """Seconds of one layer under `layout`."""
        key = tokens_key(layout)
        if key not in self._layers:
            self._layers[key] = LayerTime(self.ctx, layout)
        return self._layers[key]

    def data(self, layout: Layout, layers: int) -> DataTraffic:
        """Data ranks' collectives over the parameters that a rank with `layers` layers updates."""
        key = (states_key(layout), layers)
        if key not in self._data:
            workload = self.ctx.workload
            trains_all = workload.adapted is None
            params = rank_params(workload.spec, layout, layers) if trains_all else adapter_params(workload)
            self._data[key] = DataTraffic(self.ctx, layout, params, layers=layers)
        return self._data[key]

    def step(self, layout: Layout, levers: Levers) -> StepTime:
        """One optimizer step."""
        return self.layout_cost(layout).step(levers)


class LayoutCost:
    """The parts of a step's time that depend on the layout alone; `step` adds what levers change."""

    def __init__(self, costs: Costs, layout: Layout) -> None:
        self.ctx, self.layout, self.step = costs.ctx, layout, cache(self._step)
        workload = self.ctx.workload
        self.micro_batches = workload.micro_batches(layout)
        counts = layer_counts(workload.spec, workload.sequence_length, layout)
        self.layers = max(counts)
        self.layer = costs.layer(layout)
        self.data = costs.data(layout, self.layers)
        self.params = self.data.params
        self.teacher_s = teacher_s(self.ctx, layout)
        most_layers = PassSeconds().plus(self.layer.passes, self.layers)
        with_head = self.layer.head.plus(self.layer.passes, counts[0 if layout.in_v else -1])
        self.passes = PassSeconds(*map(max, most_layers, with_head))
        """The card's seconds on the slowest pipeline rank: that with most layers, or that with the head."""

        tokens, engine = self.layer.tokens, workload.engine
        hidden_bytes = tokens * workload.spec.hidden_size * workload.weight_bytes
        self.stream_bytes = hidden_bytes / (layout.tensor if layout.splits_stream else 1)
        self.tensor = self._tensor_traffic(counts)
        self.layer_context_s = layer_context_s(self.ctx, layout, self.layer)
        routed_bytes = self.stream_bytes if engine.routes_split_tokens else hidden_bytes
        self.expert_s = expert_one_way_s(self.ctx, layout, layers=self.layers, hidden_bytes=routed_bytes)
        stages = self.ctx.group(layout.tensor * layout.gradient_ranks, layout.pipeline)
        self.send_s = layout.stages_per_rank * stages.send_s(self.stream_bytes)
        """Seconds of a micro-batch's sends in one direction."""
        if engine.overlaps_sends:
            self.send_s /= layout.stages_per_rank  # the first of a micro-batch's only

    def _tensor_traffic(self, counts: Sequence[int]) -> TensorTraffic:
        """Traffic of tensor ranks in a line or on a mesh."""
        tokens = self.layer.tokens
        if self.layout.tensor_mesh == "1d":
            return tensor_traffic(self.ctx, self.layout, counts, tokens=tokens)
        return mesh_traffic(self.ctx, self.layout, counts, tokens=tokens, params=self.params.dense)

    def is_captured(self, levers: Levers) -> bool:
        """Whether forward and backward are launched as a CUDA graph."""
        return self._host(levers).is_captured

    def _step(self, levers: Levers) -> StepTime:
        """One optimizer step with `levers`."""
        layout, micro, host = self.layout, self.micro_batches, self._host(levers)
        compute, recomputed, waits = host.compute, host.recomputed, host.waits
        regather_s = exposed_s((1 - recomputed.share) * self.tensor.regather_s, compute.backward_s, 2 * self.layers)
        context = PassSeconds().plus(self.layer_context_s, self.layers)
        passes = self._with_traffic(compute, context, regather_s)
        sends_s = 2 * self.send_s
        tensor_s = 2 * self.tensor.one_way_s + recomputed.share * self.tensor.recompute_s
        exposed_tensor_s = (1 - self.ctx.workload.engine.tensor_hidden_share) * tensor_s + regather_s
        return StepTime(
            compute_s=micro * compute.both_s,
            recompute_s=micro * recomputed.seconds,
            launch_s=host.step_waits_s,
            tensor_s=self.tensor.once_s + micro * exposed_tensor_s,
            context_s=micro * ((1 + recomputed.share) * context.forward_s + context.backward_s),
            expert_s=micro * (2 + recomputed.share / 2) * self.expert_s,  # recomputation does not send tokens back
            data_s=self.data.step_s(
                micro_batches=micro,
                forward_s=passes.forward_s,
                backward_s=passes.backward_s + recomputed.seconds + waits.both_s,
            ),
            pipeline_s=micro * sends_s,
            bubble_s=bubble_s(
                layout,
                micro_batches=micro,
                forward_s=passes.forward_s + sends_s,
                backward_s=passes.backward_s,
                recompute_s=recomputed.seconds + waits.both_s,
            ),
            offload_s=self._offload_s(levers, host, passes),
            optimizer_s=host.step_update_s,
            straggler_s=straggler_share(layout.ranks) * micro * (compute.both_s + recomputed.seconds),
            teacher_s=micro * self.teacher_s,
        )

    def _host(self, levers: Levers) -> HostLaunches:
        """What the host launches in a step, beside the card's own seconds of it."""
        return HostLaunches(
            ctx=self.ctx,
            layout=self.layout,
            levers=levers,
            layers=self.layers,
            micro_batches=self.micro_batches,
            compute=self._compute(levers),
            recomputed=recompute(self.ctx.workload, self.layout, levers, self.layer, self.layers),
            update_s=update_s(self.ctx, self.layout, levers, self.params, micro_batches=self.micro_batches),
        )

    def _compute(self, levers: Levers) -> PassSeconds:
        """The card's seconds of forward and backward, with the changes by fp8 products, tiles and the plain loss."""
        more = fp8_more_s(self.ctx, self.layer, levers).plus(tiled_more_s(self.ctx, self.layer, levers))
        is_plain_loss = levers.loss == "plain" or self.ctx.workload.engine.passes.logits is not None
        plain_loss_s = self.layer.plain_loss_more_s if is_plain_loss else 0.0
        return self.passes.plus(more, self.layers).plus(PassSeconds(backward_s=plain_loss_s))

    def _with_traffic(self, compute: PassSeconds, context: PassSeconds, regather_s: float) -> PassSeconds:
        """A micro-batch's passes with the collectives that compute waits for."""
        tensor_s, expert_s = self.tensor.one_way_s, self.expert_s
        return PassSeconds(
            compute.forward_s + tensor_s + expert_s + context.forward_s,
            compute.backward_s + tensor_s + regather_s + expert_s + context.backward_s,
        )

    def offload(self, levers: Levers) -> OffloadTime:
        """Copies over the host link."""
        return OffloadTime(
            ctx=self.ctx, layout=self.layout, levers=levers, params=self.params, micro_batches=self.micro_batches
        )

    def _offload_s(self, levers: Levers, host: HostLaunches, passes: PassSeconds) -> float:
        """Copies over the host link that the passes, with the traffic and launches they wait for, do not hide."""
        recomputed, offload = host.recomputed, self.offload(levers)
        if offload.moves_nothing:
            return 0.0
        return offload.step_s(
            checkpoint_bytes=recomputed.share * self.layers * self.stream_bytes,  # layers' inputs
            passes=passes.plus(PassSeconds(backward_s=recomputed.seconds)).plus(host.waits),
            kernels=long_kernels(self.ctx.workload.spec, self.layer, levers, recomputed, self.layers),
            launches=host.launches,
        )
