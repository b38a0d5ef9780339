"""Steps of a pipeline that is not flushed between them (schedule 2bw): a step is reported while the next one runs.

When all micro-batches of a step have gone forward, every rank but the last still has some of them to run backward,
which it does while the next step's micro-batches go forward. So `take` enters a step and updates weights with the
gradients of the step before, whose loss and gradient norm (every rank has a part) were all-reduced meanwhile. All ranks
clip by the same norm and stop at the same loss, as in step.py. `finish` flushes the pipeline: before evaluating,
saving and at the end. The numbers do not depend on when the pipeline is flushed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.parallel.pipeline_2bw import TwoVersionPipeline
from tightfit.parallel.ranks import Ranks
from tightfit.train.optimizer.adamw import MasterAdamW
from tightfit.train.step import (
    Batch,
    NotFiniteError,
    OnPhase,
    StepResult,
    counted_labels,
    gradient_factor,
    inputs,
    loss_and_squares,
    require_finite,
)


@dataclass
class _EnteredStep:
    """A step whose gradients have not been applied to the weights yet."""

    lr: float
    tokens: int | Tensor
    loss: Tensor
    """This rank's part of the step's mean loss."""
    gradients: list[Tensor | None] = field(default_factory=list)
    sums: Tensor | None = None
    """The loss and Σ g² over all processes, once `work` is done."""
    work: dist.Work | None = None


class BufferedSteps:
    """The steps of one rank. All ranks call its methods alike."""

    def __init__(self, model: TwoVersionPipeline, optimizer: MasterAdamW) -> None:
        self.model, self.optimizer = model, optimizer
        self._before: _EnteredStep | None = None

    def take(
        self, batches: Sequence[Batch], device: torch.device, lr: float, on_phase: OnPhase, ranks: Ranks
    ) -> StepResult | None:
        """Enter a step, update with the step before and return its result; None where the pipeline was empty.

        Raises NotFiniteError on all ranks alike, before weights change.
        """
        counted, tokens, total = counted_labels(batches, device, ranks)
        given = [inputs(batch, device) for batch in batches]
        loss = self.model.enter(given, counted, total, on_phase, lambda: self._completed(ranks))
        told = self._update(on_phase)
        self._before = _EnteredStep(lr, tokens, loss)
        return told

    def finish(self, on_phase: OnPhase, ranks: Ranks) -> StepResult | None:
        """Flush the pipeline, update with the last step and return its result; None where the pipeline was empty."""
        if self._before is None:
            return None
        self.model.drain(lambda: self._completed(ranks))
        told = self._update(on_phase)
        self._before = None
        return told

    def take_alone(
        self, batches: Sequence[Batch], device: torch.device, lr: float, on_phase: OnPhase, ranks: Ranks
    ) -> StepResult:
        """Take a step and flush: the same numbers, with a pipeline bubble."""
        before = self.take(batches, device, lr, on_phase, ranks)
        assert before is None, "the step before is told by `finish`"
        told = self.finish(on_phase, ranks)
        assert told is not None
        return told

    def _completed(self, ranks: Ranks) -> None:
        """Set the complete gradients of the step before aside, and start the all-reduce of its loss and Σ g²."""
        step, parameters = self._before, self.model.versions.parameters
        assert step is not None
        step.sums = loss_and_squares(step.loss, self.optimizer, ranks)
        step.work = dist.all_reduce(step.sums, async_op=True)
        step.gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

    def _update(self, on_phase: OnPhase) -> StepResult | None:
        """Update weights with the gradients of the step before; those of the step after it are put back afterwards."""
        step, parameters = self._before, self.model.versions.parameters
        if step is None:
            return None
        self.model.receive_tied()
        later = [parameter.grad for parameter in parameters]
        _set_gradients(parameters, step.gradients)
        step.gradients = []  # so that the update frees them one by one
        on_phase("optimizer")
        result, norm = _told(step)
        with self.model.versions.updating():
            self.optimizer.step(step.lr, gradient_factor(norm, self.optimizer.settings.clip_norm, 1.0))
        _set_gradients(parameters, later)
        return result


def _told(step: _EnteredStep) -> tuple[StepResult, Tensor]:
    """The step's result, equal on all ranks, and its gradient norm on the device."""
    assert step.work is not None, "its gradients are complete"
    assert step.sums is not None
    step.work.wait()
    mean, squares = step.sums.unbind()
    norm = squares.sqrt().float()
    known = [mean.float(), norm, torch.as_tensor(step.tokens, device=norm.device)]
    loss_value, norm_value, tokens = torch.stack([x.double() for x in known]).tolist()
    require_finite(loss_value)
    if not math.isfinite(norm_value):
        raise NotFiniteError(f"the gradient norm is {norm_value}")
    return StepResult(loss_value, norm_value, int(tokens), skipped=False), norm


def _set_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
