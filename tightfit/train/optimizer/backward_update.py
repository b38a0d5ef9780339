"""The optimizer step inside backward: each weight is updated as soon as its gradient is complete, which is then freed.

No two weights' gradients need exist at once, which saves 2 bytes a weight in mixed precision (4 in fp32). But the
global gradient norm is not known yet, so gradients are clipped by an estimate: the norm of the previous step, scaled by
how much the gradients seen so far have changed since,

    estimate² = T · (seen now + T/100) / (seen then + T/100)

with T = Σ‖g‖² of the previous step and `seen` the part of Σ‖g‖² that is complete. It begins near the previous norm and
ends at this step's own. In the first step it is √n · the gradient's own norm, for n weights, so that all together stay
within clip_norm. Norms are saved with the optimizer states, so that a resumed run continues identically.
A loss that is not finite is noticed before backward; a gradient that is not, only after weights were updated with it.

Under ZeRO each rank updates its shard once FSDP2 has reduced the gradients of a layer, which it tells by the same hook.
FSDP2 reduces a layer's gradients together, so weights come in another order than on one GPU, and the estimates differ a
little. Tensor and expert ranks have shards of their own. ‖g‖² is summed over all shards of a weight, a number per
weight, so that all ranks clip alike; without clipping once, when backward is over. The gradients that tensor ranks have
in part (of norms, mostly) are summed when they are complete, before their update.
Refused (jobs/rules): several micro-batches, whose gradients add up and are all there before the last backward; DDP,
whose buckets hold them all; fp16. As in LOMO (Lv et al. 2023), here with AdamW.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.collectives.shards import ParameterSplit, is_shard, local
from tightfit.kernels.clip_estimate import CLIP_EPSILON, clip_estimate, trusted_totals

TINIEST = 1e-30
Apply = Callable[[float, Tensor | None], None]
"""Updates one weight at a learning rate with its gradient times a factor, and frees the gradient."""


@dataclass(frozen=True)
class EarlyUpdate:
    """A weight to be updated inside backward, and how tensor and expert ranks split it."""

    parameter: Tensor
    apply: Apply
    split: ParameterSplit | None = None

    def groups(self) -> Iterator[dist.ProcessGroup]:
        """The ranks, axis by axis, that have the other shards of it."""
        if is_shard(self.parameter):
            for axis, placement in enumerate(self.parameter.placements):
                if placement.is_shard() and self.parameter.device_mesh.size(axis) > 1:
                    yield self.parameter.device_mesh.get_group(axis)
        for cut in () if self.split is None else self.split.cuts:
            yield cut.mesh.get_group()

    def complete_gradient(self, gradient: Tensor) -> None:
        """Sum a gradient that each tensor rank has in part."""
        for axis in () if self.split is None else self.split.summed_over:
            dist.all_reduce(local(gradient), group=axis.get_group())


class BackwardUpdate:
    """Gradient hooks that update parameters during backward; call `begin` before it and `finish` after."""

    def __init__(
        self, updates: list[EarlyUpdate], clip_norm: float, after_backward: Sequence[Callable[[], None]] = ()
    ) -> None:
        self.clip_norm, self.lr, self.count = clip_norm, 0.0, len(updates)
        self.after_backward = after_backward
        device = updates[0].parameter.device
        self.norms = torch.zeros(2, self.count, dtype=torch.float32, device=device)
        """‖g‖ of every gradient in this step and in the previous one; 0 where there was none."""
        self.seen = torch.zeros(2, dtype=torch.float32, device=device)
        """Σ‖g‖² of the gradients complete so far, in this step and in the previous one."""
        self.own_norms = [self.norms[0, number] for number in range(self.count)]
        self.is_first: bool | None = None
        self.previous_totals = torch.zeros(2, dtype=torch.float32, device=device)
        """Σ‖g‖² of the previous step, and the share of it that the estimate trusts."""
        self.updates = updates
        self.groups = [list(update.groups()) for update in updates]
        for number, update in enumerate(updates):
            update.parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), number))

    @property
    def previous_norms(self) -> Tensor:
        """‖g‖ of every gradient in the previous step."""
        return self.norms[1]

    @torch.no_grad()
    def begin(self, lr: float) -> None:
        """Prepare for a backward pass whose updates have this learning rate."""
        self.lr = lr
        if self.is_first is None:  # not in the constructor: states may have been loaded since
            self.is_first = not bool(self.previous_norms.any())
        self.norms[0].zero_()
        self.seen.zero_()
        self.previous_totals = trusted_totals(self.previous_norms.square().sum().clamp(min=TINIEST))

    @torch.no_grad()
    def finish(self) -> Tensor:
        """The global gradient norm of the pass, before clipping."""
        for call in self.after_backward:
            call()
        if not self.clip_norm:
            self._sum_over_shards()
        self.norms[1].copy_(self.norms[0])
        self.is_first = False
        return self.seen[0].sqrt()

    @torch.no_grad()
    def complete(self, number: int, gradient: Tensor) -> None:
        """Update parameter `number`, whose gradient is complete."""
        update, own_norm = self.updates[number], self.own_norms[number]
        update.complete_gradient(gradient)
        torch.linalg.vector_norm(local(gradient), dtype=torch.float32, out=own_norm)
        if self.clip_norm:
            _sum_squares(own_norm, self.groups[number])
        update.apply(self.lr, self._factor(number))

    def _sum_over_shards(self) -> None:
        """Of all weights at once: those that are split over the same ranks together."""
        numbers_of: dict[tuple[str, ...], list[int]] = {}
        for number, groups in enumerate(self.groups):
            numbers_of.setdefault(tuple(group.group_name for group in groups), []).append(number)
        for numbers in numbers_of.values():
            norms = self.norms[0, numbers]
            _sum_squares(norms, self.groups[numbers[0]])
            self.norms[0, numbers] = norms
        self.seen[0] = self.norms[0].square().sum()

    def _factor(self, number: int) -> Tensor | None:
        """What gradient `number` is multiplied by; its square is added to what has been seen."""
        if not self.clip_norm:
            return None
        if self.is_first:
            both = self.norms[:, number]
            self.seen.addcmul_(both, both)
            return (self.clip_norm / (self.count**0.5 * both[0] + CLIP_EPSILON)).clamp(max=1.0)
        return clip_estimate(self.norms, number, self.seen, self.previous_totals, self.clip_norm)


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
        assert parameter.grad is not None
        alive.complete(number, parameter.grad)

    return complete
