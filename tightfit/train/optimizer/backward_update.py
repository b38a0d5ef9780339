"""The optimizer step inside backward: each matrix is updated as soon as its gradient is complete, which is then freed.

No two matrices' gradients need exist at once, which saves 2 bytes a weight in mixed precision (4 in fp32). But the
global gradient norm is not known yet, so gradients are clipped by an estimate: the norm of the previous step, scaled by
how much the gradients seen so far have changed since,

    estimate² = T · (seen now + T/100) / (seen then + T/100)

with T = Σ‖g‖² of the previous step and `seen` the part of Σ‖g‖², in this step (now) and the previous one (then), of
gradients complete so far. The estimate begins near the previous norm and ends at this step's own. In the first step it
is √n · the gradient's own norm, for n weights, so that all gradients together stay within clip_norm. Gradient norms are
saved with the optimizer states, so that a resumed run continues identically.
Biases and weights of norms are many and tiny: ten of the sixteen tensors of a GPT-2 layer, less than a thousandth of
its weights, yet their updates would be most of the host's launches. They are updated together after backward (late),
clipped by the norm of this step.
A loss that is not finite is noticed before backward, by the host, or in a CUDA graph by the updates, whose factor is
then NaN (`skip_unless_finite`); a gradient that is not finite, only after weights were updated with it.

Under ZeRO each rank updates its shard once FSDP2 has reduce-scattered the gradients of a layer; the same hook fires.
FSDP2 reduces a layer's gradients together, so weights come in another order than on one GPU, and the estimates differ a
little. Tensor and expert ranks have shards of their own. ‖g‖² is summed over all shards of a weight, one number per
weight, so that all ranks clip by the same factor; for late weights, and without clipping, in one all-reduce after
backward. Partial gradients of tensor ranks are summed before the update: a matrix's when it is complete, all others'
after backward, as without this lever (parallel/tensor.py).
Refused (jobs/rules): several micro-batches, whose accumulated gradients all exist before the last backward; DDP, whose
buckets hold all gradients; fp16. As in LOMO (Lv et al. 2023), here with AdamW.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.collectives.shards import ParameterSplit, is_shard, like_shard, local
from tightfit.kernels.optimizer.clip_estimate import clip_estimate, clip_factor, trusted_totals

TINIEST = 1e-30
Apply = Callable[[float, Tensor | None], None]
"""Updates one weight at a learning rate with its gradient times a factor, and frees the gradient."""


@dataclass(frozen=True)
class SplitWeight:
    """A weight to update, and how tensor and expert ranks split it."""

    parameter: Tensor
    split: ParameterSplit | None = None

    def groups(self) -> Iterator[dist.ProcessGroup]:
        """The process groups, one per axis of the mesh, of the ranks that hold the weight's shards."""
        if is_shard(self.parameter):
            for axis, placement in enumerate(self.parameter.placements):
                if placement.is_shard() and self.parameter.device_mesh.size(axis) > 1:
                    yield self.parameter.device_mesh.get_group(axis)
        for cut in () if self.split is None else self.split.cuts:
            yield cut.mesh.get_group()

    @property
    def gradient(self) -> Tensor | None:
        """This rank's shard of the gradient."""
        return None if self.parameter.grad is None else local(self.parameter.grad)

    def complete_gradient(self) -> Tensor:
        """This rank's shard of the gradient, after partial gradients of tensor ranks are all-reduced."""
        gradient = self.gradient
        assert gradient is not None
        for axis in () if self.split is None else self.split.summed_over:
            dist.all_reduce(gradient, group=axis.get_group())
        return gradient


@dataclass(frozen=True)
class Update:
    """Weights that are updated together."""

    weights: Sequence[SplitWeight]
    apply: Apply


class BackwardUpdate:
    """Gradient hooks that update parameters during backward; call `begin` before it and `finish` after.

    An `early` update has one weight, and runs when its gradient is complete; `late` ones run in `finish`.
    """

    def __init__(
        self,
        early: Sequence[Update],
        clip_norm: float,
        late: Sequence[Update] = (),
        after_backward: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.early, self.late, self.clip_norm, self.lr = early, late, clip_norm, 0.0
        self.after_backward = after_backward
        weights = [weight for update in (*early, *late) for weight in update.weights]
        self.count, device = len(weights), weights[0].parameter.device
        self.norms = torch.zeros(2, self.count, dtype=torch.float32, device=device)
        """‖g‖ of every gradient in this step and in the previous one; 0 where there was none."""
        self.seen = torch.zeros(2, dtype=torch.float32, device=device)
        """Σ‖g‖² of the gradients complete so far, in this step and in the previous one."""
        self.own_norms = [self.norms[0, number] for number in range(self.count)]
        self.is_first: bool | None = None
        self.previous_totals = torch.zeros(2, dtype=torch.float32, device=device)
        """Σ‖g‖² of the previous step, and the share of it that the estimate trusts."""
        self.gate: Tensor | None = None
        """Multiplies every gradient factor: 1, or NaN, for which updates change nothing; None where the host has seen
        the loss."""
        self.groups = [list(weight.groups()) for weight in weights]
        for number, update in enumerate(early):
            (weight,) = update.weights
            weight.parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), number))
        for weight in weights[len(early) :]:
            if is_shard(weight.parameter):
                weight.parameter.register_post_accumulate_grad_hook(_keep_apart)

    @property
    def previous_norms(self) -> Tensor:
        """‖g‖ of every gradient in the previous step."""
        return self.norms[1]

    @torch.no_grad()
    def begin(self, lr: float) -> None:
        """Prepare for a backward pass whose updates have this learning rate."""
        self.lr, self.gate = lr, None
        if self.is_first is None:  # not in the constructor: states may have been loaded since
            self.is_first = not bool(self.previous_norms.any())
        self.norms[0].zero_()
        self.seen.zero_()
        self.previous_totals = trusted_totals(self.previous_norms.square().sum().clamp(min=TINIEST))

    @torch.no_grad()
    def skip_unless_finite(self, loss: Tensor) -> None:
        """Make this pass update nothing if `loss`, which the host has not read yet, is not finite."""
        self.gate = torch.where(loss.isfinite(), 1.0, torch.nan)
        self.previous_totals = self.previous_totals * self.gate

    @torch.no_grad()
    def finish(self) -> Tensor:
        """Run the late updates; return the global gradient norm of the pass, before clipping."""
        for call in self.after_backward:
            call()
        self._measure_late()
        if not self.clip_norm:
            self._sum_over_shards(0)
            self.seen[0] = self.norms[0].square().sum()
        factor = self._late_factor()
        for update in self.late:
            update.apply(self.lr, factor)
        own = self.norms[0] if self.gate is None else torch.where(self.gate.isnan(), self.norms[1], self.norms[0])
        self.norms[1].copy_(own)
        self.is_first = False
        return self.seen[0].sqrt()

    @torch.no_grad()
    def complete(self, number: int) -> None:
        """Update the weight of early update `number`, whose gradient is complete."""
        update, own_norm = self.early[number], self.own_norms[number]
        torch.linalg.vector_norm(update.weights[0].complete_gradient(), dtype=torch.float32, out=own_norm)
        if self.clip_norm:
            _sum_squares(own_norm, self.groups[number])
        update.apply(self.lr, self._factor(number))

    def _measure_late(self) -> None:
        """Write the norms of the late gradients to `norms`."""
        waiting = [weight.gradient for update in self.late for weight in update.weights]
        places = zip(waiting, self.own_norms[len(self.early) :], strict=True)
        if there := [(each, place) for each, place in places if each is not None and each.numel()]:
            gradients, norms = zip(*there, strict=True)
            torch._foreach_copy_(norms, torch._foreach_norm(gradients, 2, torch.float32))

    def _sum_over_shards(self, first: int) -> None:
        """Sum the squared norms of all weights from `first` on over their shards: one all-reduce per set of ranks.

        Process groups are compared by their ranks, not their names: meshes may share a group on one rank and not on
        another, and all ranks must combine the same weights.
        """
        numbers_of: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for number, groups in enumerate(self.groups[first:], first):
            if groups:
                ranks = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
                numbers_of.setdefault(ranks, []).append(number)
        for numbers in numbers_of.values():
            norms = self.norms[0, numbers]
            _sum_squares(norms, self.groups[numbers[0]])
            self.norms[0, numbers] = norms

    def _factor(self, number: int) -> Tensor | None:
        """The factor of early gradient `number`; adds its square to `seen`."""
        if not self.clip_norm:
            return self.gate
        if self.is_first:
            both = self.norms[:, number]
            self.seen.addcmul_(both, both)
            return clip_factor(self.count**0.5 * both[0], self.clip_norm)
        return clip_estimate(self.norms, number, self.seen, self.previous_totals, self.clip_norm)

    def _late_factor(self) -> Tensor | None:
        """The factor of all late gradients; all norms are known now. In the first step, where each early gradient was
        clipped to clip_norm / √n, the m late ones together are clipped to clip_norm · √(m / n)."""
        if not self.clip_norm:
            return self.gate
        first = len(self.early)
        self._sum_over_shards(first)
        squares = self.norms[:, first:].square().sum(dim=1)
        self.seen += squares
        if self.is_first:
            return clip_factor(squares[0].sqrt(), self.clip_norm * ((self.count - first) / self.count) ** 0.5)
        factor = clip_factor(self.seen[0].sqrt(), self.clip_norm)
        return factor if self.gate is None else factor * self.gate


def _sum_squares(norms: Tensor, groups: Sequence[dist.ProcessGroup]) -> None:
    """Make norms of this rank's shards those of all shards, in place."""
    if groups:
        squares = norms.square()
        for group in groups:
            dist.all_reduce(squares, group=group)
        norms.copy_(squares.sqrt())


def _hook(updates: "weakref.ref[BackwardUpdate]", number: int) -> Callable[[Tensor], None]:
    """The gradient hook of early update `number`. Its reference is weak: a strong one would be a cycle through
    autograd, which Python's garbage collector cannot see."""

    def complete(parameter: Tensor) -> None:
        alive = updates()
        assert alive is not None, "a backward pass after the optimizer is gone"
        alive.complete(number)

    return complete


def _keep_apart(parameter: Tensor) -> None:
    """Copy a late gradient out of the one buffer in which FSDP2 reduces a layer's gradients, so that the buffer is
    freed once the early ones are."""
    assert parameter.grad is not None
    assert is_shard(parameter)
    parameter.grad = like_shard(local(parameter.grad).clone(), parameter)
