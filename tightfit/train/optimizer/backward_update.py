"""The optimizer step inside backward: each matrix is updated as soon as its gradient is complete, which is then freed.

No two matrices' gradients need exist at once, which saves 2 bytes a weight in mixed precision (4 in fp32). But the
global gradient norm is not known yet, so gradients are clipped by an estimate: the norm of the previous step, scaled by
how much the gradients seen so far have changed since,

    estimate² = T · (seen now + T/100) / (seen then + T/100)

with T = Σ‖g‖² of the previous step and `seen` the part of Σ‖g‖² that is complete. It begins near the previous norm and
ends at this step's own. In the first step it is √n · the gradient's own norm, for n weights, so that all together stay
within clip_norm. Norms are saved with the optimizer states, so that a resumed run continues identically.
Norms' weights and biases are many and tiny: ten of the sixteen tensors of a GPT-2 layer, less than a thousandth of its
weights, whose updates would be most of what the host launches. They are updated together when backward is over, clipped
by the norm of this step.
A loss that is not finite is noticed before backward, by the host, or in a CUDA graph by the updates, whose factor is
then NaN (`skip_unless_finite`); a gradient that is not, only after weights were updated with it.

Under ZeRO each rank updates its shard once FSDP2 has reduced the gradients of a layer, which it tells by the same hook.
FSDP2 reduces a layer's gradients together, so weights come in another order than on one GPU, and the estimates differ a
little. Tensor and expert ranks have shards of their own. ‖g‖² is summed over all shards of a weight, a number per
weight, so that all ranks clip alike; of late ones, and without clipping, once, when backward is over. Gradients that
tensor ranks have in part are summed before their update: a matrix's when it is complete, all others' after backward, as
without this lever (parallel/tensor.py).
Refused (jobs/rules): several micro-batches, whose gradients add up and are all there before the last backward; DDP,
whose buckets hold them all; fp16. As in LOMO (Lv et al. 2023), here with AdamW.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.collectives.shards import ParameterSplit, is_shard, like_shard, local
from tightfit.kernels.clip_estimate import clip_estimate, clip_factor, trusted_totals

TINIEST = 1e-30
Apply = Callable[[float, Tensor | None], None]
"""Updates one weight at a learning rate with its gradient times a factor, and frees the gradient."""


@dataclass(frozen=True)
class SplitWeight:
    """A weight to be updated, and how tensor and expert ranks split it."""

    parameter: Tensor
    split: ParameterSplit | None = None

    def groups(self) -> Iterator[dist.ProcessGroup]:
        """The ranks, axis by axis, that have the other shards of it."""
        if is_shard(self.parameter):
            for axis, placement in enumerate(self.parameter.placements):
                if placement.is_shard() and self.parameter.device_mesh.size(axis) > 1:
                    yield self.parameter.device_mesh.get_group(axis)
        for cut in () if self.split is None else self.split.cuts:
            yield cut.mesh.get_group()

    @property
    def gradient(self) -> Tensor | None:
        """This rank's part of it."""
        return None if self.parameter.grad is None else local(self.parameter.grad)

    def complete_gradient(self) -> Tensor:
        """The same, once what each tensor rank has in part is summed."""
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

    Of `early` updates each is one weight's; `late` ones wait until backward is over.
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
        """What factors are multiplied by: 1, or NaN, which updates nothing; None where the host has seen the loss."""
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
        """Update nothing in this pass if the loss turns out not to be finite, which the host does not know yet."""
        self.gate = torch.where(loss.isfinite(), 1.0, torch.nan)
        self.previous_totals = self.previous_totals * self.gate

    @torch.no_grad()
    def finish(self) -> Tensor:
        """Update what waited for backward to end; the global gradient norm of the pass, before clipping."""
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
        """The norms of the late gradients."""
        waiting = [weight.gradient for update in self.late for weight in update.weights]
        places = zip(waiting, self.own_norms[len(self.early) :], strict=True)
        if there := [(each, place) for each, place in places if each is not None and each.numel()]:
            gradients, norms = zip(*there, strict=True)
            torch._foreach_copy_(norms, torch._foreach_norm(gradients, 2, torch.float32))

    def _sum_over_shards(self, first: int) -> None:
        """Of all weights from `first` on at once: those that are split over the same ranks together.

        Groups are told apart by their ranks: meshes share groups of equal ranks, and those on one rank but not those on
        another, so that names would put weights together differently from rank to rank.
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
        """What early gradient `number` is multiplied by; its square is added to what has been seen."""
        if not self.clip_norm:
            return self.gate
        if self.is_first:
            both = self.norms[:, number]
            self.seen.addcmul_(both, both)
            return clip_factor(self.count**0.5 * both[0], self.clip_norm)
        return clip_estimate(self.norms, number, self.seen, self.previous_totals, self.clip_norm)

    def _late_factor(self) -> Tensor | None:
        """What all late gradients are multiplied by: all norms are known now. In the first step, where others have been
        clipped one by one, they share what was left to them."""
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
    """Weakly: a strong reference would be a cycle through autograd, which Python's garbage collector cannot see."""

    def complete(parameter: Tensor) -> None:
        alive = updates()
        assert alive is not None, "a backward pass after the optimizer is gone"
        alive.complete(number)

    return complete


def _keep_apart(parameter: Tensor) -> None:
    """FSDP2's gradients of a layer are parts of one buffer, which is freed once none is left: one that waits has
    memory of its own."""
    assert parameter.grad is not None
    assert is_shard(parameter)
    parameter.grad = like_shard(local(parameter.grad).clone(), parameter)
