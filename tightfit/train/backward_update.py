"""The optimizer step inside backward: a weight is updated as soon as its gradient is complete, and that is freed.

No two weights' gradients need exist at once, which saves 2 bytes a weight in mixed precision (4 in fp32). The price is
what is not known yet: the norm of all gradients. So gradients are clipped by an estimate of it: the norm of the step
before, changed as the gradients that are there already have changed since,

    estimate² = T · (seen now + T/100) / (seen then + T/100)        T = Σ‖g‖² of the step before, seen: of those so far

which begins near the norm of the step before, follows gradients that grow or shrink, and ends at this step's own norm.
In the first step it is √n · the gradient's own norm, for n weights, so that all are within clip_norm together.
The norms are saved with the states, so that a resumed run goes on alike.
A loss that is not finite is noticed before backward; gradients that are not, only when weights have taken them in.
Refused (jobs/rules): accumulation, several ranks, fp16. As in Lv et al. 2023 (LOMO), here with AdamW.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CLIP_EPSILON = 1e-6
TRUST = 1 / 100
"""Of the step before, which counts as much as this share of its gradients, seen again unchanged."""
TINIEST = 1e-30
Apply = Callable[[float, Tensor | None], None]
"""Updates one weight at a learning rate, with its gradient multiplied by a factor, and lets go of the gradient."""


class BackwardUpdate:
    """Hooks on parameters that update them during backward; `begin` before it and `finish` after."""

    def __init__(
        self, updates: list[tuple[Tensor, Apply]], clip_norm: float, afterwards: Sequence[Callable[[], None]] = ()
    ) -> None:
        self.clip_norm, self.lr, self.count = clip_norm, 0.0, len(updates)
        self.afterwards = afterwards
        """What is called when the pass is over, such as for updates that were put off."""
        device = updates[0][0].device
        self.norms = torch.zeros(2, self.count, dtype=torch.float32, device=device)
        """Of every gradient, in this step and in the one before; 0 where there was none."""
        self.seen = torch.zeros(2, dtype=torch.float32, device=device)
        """Of gradients that are there already, Σ‖g‖² in this step and in the one before."""
        self.is_first: bool | None = None
        self.whole = torch.zeros((), dtype=torch.float32, device=device)
        self.applies = [apply for _, apply in updates]
        for number, (parameter, _) in enumerate(updates):
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), number))

    @property
    def previous_norms(self) -> Tensor:
        """What the next step knows of this one."""
        return self.norms[1]

    @torch.no_grad()
    def begin(self, lr: float) -> None:
        """A backward pass follows, whose updates have this learning rate."""
        self.lr = lr
        if self.is_first is None:  # states may have been loaded
            self.is_first = not bool(self.previous_norms.any())
        self.norms[0].zero_()
        self.seen.zero_()
        self.whole = self.previous_norms.square().sum().clamp(min=TINIEST)

    @torch.no_grad()
    def finish(self) -> Tensor:
        """The norm of all gradients of the pass, before clipping."""
        for call in self.afterwards:
            call()
        self.norms[1].copy_(self.norms[0])
        self.is_first = False
        return self.seen[0].sqrt()

    @torch.no_grad()
    def complete(self, number: int, gradient: Tensor) -> None:
        """All of the gradient of parameter `number` is there."""
        both = self.norms[:, number]
        torch.linalg.vector_norm(gradient, dtype=torch.float32, out=both[0])
        self.seen.addcmul_(both, both)
        self.applies[number](self.lr, self._factor(both[0]))

    def _factor(self, own_norm: Tensor) -> Tensor | None:
        if not self.clip_norm:
            return None
        if self.is_first:
            return (self.clip_norm / (self.count**0.5 * own_norm + CLIP_EPSILON)).clamp(max=1.0)
        now, then = (self.seen + TRUST * self.whole).unbind()
        return (self.clip_norm / ((self.whole * now / then).sqrt() + CLIP_EPSILON)).clamp(max=1.0)


def _hook(updates: "weakref.ref[BackwardUpdate]", number: int) -> Callable[[Tensor], None]:
    """Parameters must not keep the optimizer alive: nobody could find that circle, which goes through autograd."""

    def complete(parameter: Tensor) -> None:
        alive = updates()
        assert alive is not None, "a backward pass after the optimizer is gone"
        assert parameter.grad is not None
        alive.complete(number, parameter.grad)

    return complete
