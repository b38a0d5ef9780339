"""PipeDream-2BW: 1F1B that is not flushed between steps, with two versions of the weights.

The micro-batches of step t + 1 follow those of step t without a gap, as if there were no steps: rank r of K alternates
the forward of one micro-batch with the backward of the one K − 1 − r before it. A step of M micro-batches is therefore
complete on rank r only K − 1 − r backward passes into the next step, whose first forward passes have then run with
weights that lack its gradients. All ranks use the weights of one update earlier, even those that could have newer ones,
so that the whole model computes with one version:

    w(t + 1) = w(t) − ν · ∇f(w(t − 1)),   w(0) = w(−1)

Micro-batches in flight are of two steps at most (M ≥ K), so two versions are enough (weight_versions.py).

Torch's schedules flush at every step: they clear the micro-batches in flight when a step begins and wait for all of
them before it ends. So this file orders passes and messages itself, as torch's `Schedule1F1B` does in its steady state:
a send in one direction is batched with the receive from the other, without which NCCL would deadlock. Torch's stage
(pipeline_engine.py) still runs the passes and makes the send and receive operations.

Ranks complete a step's gradients at different times, and clipping needs the norm over all ranks: the gradients are kept
beside those of the next step until every rank has finished (train/buffered_steps.py). With tied embeddings the first
and the last stage exchange the weight's gradients over a group of their own, as these messages overtake the schedule's.
Source: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training".
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tightfit.errors import UserError
from tightfit.jobs.job import PrecisionName
from tightfit.jobs.layout import Layout
from tightfit.jobs.rules.pipeline import too_few_micro_batches
from tightfit.memory.ledger import Phase
from tightfit.models.decoder import Decoder
from tightfit.models.number_formats import COMPUTE_DTYPES
from tightfit.parallel.expert import sum_expert_gradients
from tightfit.parallel.pipeline import SPANS, OnPhase, Pipeline
from tightfit.parallel.pipeline_engine import BufferedStage
from tightfit.parallel.pipeline_stage import Inputs
from tightfit.parallel.tensor import sum_partial_gradients
from tightfit.parallel.weight_versions import Version, WeightVersions


@dataclass(eq=False)
class StepInFlight:
    """A step with micro-batches that have not gone backward yet, or gradients that are not yet summed."""

    weights: Version
    """The version of the weights that its micro-batches compute with."""
    left: int
    """Micro-batches whose backward is still to come."""


@dataclass
class _Gradients:
    """Gradients of a tied embedding while the first and the last stage exchange them."""

    own: Tensor
    received: Tensor
    works: list[dist.Work]

    def add(self) -> None:
        for work in self.works:
            work.wait()
        self.own.add_(self.received)


def two_version_pipeline(
    model: Decoder, mesh: DeviceMesh, layout: Layout, precision: PrecisionName
) -> "TwoVersionPipeline":
    """The pipeline of a decoder that `take_stages` has cut, and that has its weights."""
    return TwoVersionPipeline(model, vars(model)[SPANS], mesh, layout, COMPUTE_DTYPES[precision])


class TwoVersionPipeline(Pipeline):
    """A rank's stage, and the micro-batches that it has in flight between steps."""

    def __init__(self, model: Decoder, *arguments: Any) -> None:
        super().__init__(model, *arguments)
        self.versions = WeightVersions({name: p for name, p in model.named_parameters() if p.requires_grad})
        self.in_flight: deque[tuple[StepInFlight, int]] = deque()
        """Micro-batches that have gone forward, with the step they belong to."""
        self.before: StepInFlight | None = None
        """The step entered last, until its gradients are complete."""
        self._forward_sends: list[dist.P2POp] = []
        self._backward_sends: list[dist.P2POp] = []
        self._tied: _Gradients | None = None
        self._tied_group = self._group_of_ends() if model.spec.tied else None

    def _group_of_ends(self) -> dist.ProcessGroup | None:
        """The first and the last rank of this pipeline; None on the ranks between.

        All ranks create the groups of all pipelines. torch would also let two ranks create theirs alone, but names it
        by the number of groups that each of them has: a later such group of ranks whose numbers differ never meets.
        """
        own: dist.ProcessGroup | None = None
        pipelines = dist.get_world_size() // self.layout.pipeline  # the mesh's outermost axis
        for first in range(pipelines):
            ends = [first, first + (self.layout.pipeline - 1) * pipelines]
            made: dist.ProcessGroup = dist.new_group(ends)
            own = made if dist.get_rank() in ends else own
        return own

    @property
    def behind(self) -> int:
        """By how many micro-batches a backward lags the forward before it: K − 1 − r."""
        return self.layout.pipeline - 1 - self.rank

    def enter(
        self,
        batches: Sequence[Inputs],
        counted: Sequence[int],
        divisor: float | Tensor,
        on_phase: OnPhase,
        on_complete: Callable[[], None],
    ) -> Tensor:
        """Run the step's forward passes, each followed by the backward of the micro-batch that is due by then.

        Returns the step's mean loss on the rank of the last stage, 0 on the others. `on_complete` is called when the
        gradients of the step before are complete.
        """
        stage = self._prepared(batches, on_phase)
        self.stages[0].feed(batches, counted, divisor)
        step = StepInFlight(self.versions.older if self.before is None else self.versions.newest, len(batches))
        filling = self.before is None
        self._complete_if_done(on_complete)
        for number in range(len(batches)):
            self._forward(stage, step, number)
            if filling and number < self.behind:
                _exchange(self._forward_sends)
                self._forward_sends = []
            else:
                self._backward(stage, on_complete)
        assert self.before is None, "a step is complete before the next one ends where M ≥ K"
        self.before = step
        mean = self.stages[0].mean
        return torch.zeros((), device=self.device) if mean is None else mean.float()

    def drain(self, on_complete: Callable[[], None]) -> None:
        """Run backward of all micro-batches in flight; the update that follows puts the newest weights in use."""
        _exchange(self._backward_sends)
        self._backward_sends = []
        (engine,) = self._engines.values()
        self._complete_if_done(on_complete)
        while self.in_flight:
            self._backward(engine[1][0], on_complete)
            _exchange(self._backward_sends)
            self._backward_sends = []

    def _prepared(self, batches: Sequence[Inputs], on_phase: Callable[[Phase], None]) -> BufferedStage:
        if sentence := too_few_micro_batches(len(batches), self.layout.pipeline):
            raise UserError(sentence)
        known = len(self._engines)
        schedule, (stage,) = self._engine(batches)
        if not known:
            stage.has_backward = True
            schedule._initialize_stage((), {})
        stage.on_phase, stage.record = on_phase, self.recorded
        return stage

    def _forward(self, stage: BufferedStage, step: StepInFlight, number: int) -> None:
        _exchange(self._backward_sends + stage.get_fwd_recv_ops(number))
        self._backward_sends = []
        self.versions.use(step.weights)
        stage.forward_one_chunk(number, (), {}, save_forward_output=False)
        self._forward_sends = stage.get_fwd_send_ops(number)
        self.in_flight.append((step, number))

    def _backward(self, stage: BufferedStage, on_complete: Callable[[], None]) -> None:
        step, number = self.in_flight.popleft()
        _exchange(self._forward_sends + stage.get_bwd_recv_ops(number))
        self._forward_sends = []
        self.versions.use(step.weights)
        loss = stage.outputs(number)[0] if stage.is_last else None
        stage.backward_one_chunk(number, loss=loss)
        self._backward_sends = stage.get_bwd_send_ops(number)
        step.left -= 1
        self._complete_if_done(on_complete)

    def _complete_if_done(self, on_complete: Callable[[], None]) -> None:
        """Sum the gradients of the step before once all its micro-batches have gone backward."""
        if self.before is None or self.before.left:
            return
        self.before = None
        sum_partial_gradients(self.decoder)
        sum_expert_gradients(self.decoder)
        self._sum_over_data_ranks()
        self._send_tied()
        on_complete()

    def _send_tied(self) -> None:
        """Exchange a tied embedding's gradients. The last stage, which completes a step first, does not wait; the first
        stage does, and finds the last stage's already sent."""
        if self._tied_group is None:
            return
        own = self.decoder.embed.weight.grad
        assert own is not None
        received, other = torch.empty_like(own), int(self.rank == 0)
        operations = [
            dist.P2POp(dist.isend, own.contiguous(), group=self._tied_group, group_peer=other),
            dist.P2POp(dist.irecv, received, group=self._tied_group, group_peer=other),
        ]
        self._tied = _Gradients(own, received, dist.batch_isend_irecv(operations))
        if not self.has_loss:
            self.receive_tied()

    def receive_tied(self) -> None:
        """Add the other end's gradients of a tied embedding, before the update."""
        if self._tied is not None:
            self._tied.add()
            self._tied = None


def _exchange(operations: list[dist.P2POp]) -> None:
    """Send and receive, and wait for both."""
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
