"""The optimizer step inside backward: a weight is updated as soon as its gradient is complete, and that is freed.

No two weights' gradients need exist at once, which saves 2 bytes a weight in mixed precision (4 in fp32). The price is
what is not known yet: the norm of all gradients. So gradients are clipped by the norm of the step before,

    factor = min(1, clip_norm / norm of the last step)        in the first step: clip_norm / (√n · the gradient's own)

for n weights, so that the first step's are within clip_norm all together. Gradients that explode from one step to the
next are clipped a step late: keep a warm-up. The norm is saved with the states, so that a resumed run goes on alike.
A loss that is not finite is noticed before backward; gradients that are not, only when weights have taken them in.
Refused (jobs/agreement.py): accumulation, several ranks, fp16. As in Lv et al. 2023 (LOMO), here with AdamW.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CLIP_EPSILON = 1e-6
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
        self.previous_norm = torch.zeros((), dtype=torch.float32, device=device)
        """Of the step before; 0 where there was none."""
        self.squares = torch.zeros((), dtype=torch.float32, device=device)
        self.applies = [apply for _, apply in updates]
        for number, (parameter, _) in enumerate(updates):
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), number))

    def begin(self, lr: float) -> None:
        """A backward pass follows, whose updates have this learning rate."""
        self.lr = lr
        self.squares.zero_()

    @torch.no_grad()
    def finish(self) -> Tensor:
        """The norm of all gradients of the pass, before clipping; the next one is clipped by it."""
        for call in self.afterwards:
            call()
        self.previous_norm.copy_(self.squares.sqrt())
        return self.previous_norm.clone()

    @torch.no_grad()
    def complete(self, number: int, gradient: Tensor) -> None:
        """All of the gradient of parameter `number` is there."""
        own = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        self.squares += own.square()
        self.applies[number](self.lr, self._factor(own))

    def _factor(self, own_norm: Tensor) -> Tensor | None:
        if not self.clip_norm:
            return None
        norm = torch.where(self.previous_norm > 0, self.previous_norm, self.count**0.5 * own_norm)
        return (self.clip_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)


def _hook(updates: "weakref.ref[BackwardUpdate]", number: int) -> Callable[[Tensor], None]:
    """Parameters must not keep the optimizer alive: nobody could find that circle, which goes through autograd."""

    def complete(parameter: Tensor) -> None:
        alive = updates()
        assert alive is not None, "a backward pass after the optimizer is gone"
        assert parameter.grad is not None
        alive.complete(number, parameter.grad)

    return complete
