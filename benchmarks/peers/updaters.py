"""8-bit AdamW of others in the place of ours: torchao's and bitsandbytes', over the same masters and gradients.

Everything around the update stays: the model, float32 masters, widening, clipping (here by multiplying the gradients,
which ours do inside the kernel) and the copy back. Both keep vectors and small matrices in float32, as ours does.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.jobs.job import Optimizer
from tightfit.train.optimizer.adamw import MasterAdamW, decays

PARTS = ("codes", "scale")
"""What torchao's quantized tensors are made of, but for the table of values, which all share."""
SHARED = ("step", "qmap1", "qmap2")


PEERS = {"torchao": "torchao.optim", "bitsandbytes": "bitsandbytes.optim"}
"""Where each has its AdamW8bit."""


def use_peer(optimizer: MasterAdamW, peer: str) -> None:
    """Let `peer` update every bucket of `optimizer`."""
    if peer not in PEERS or find_spec(peer) is None:
        raise UserError(f"{peer!r} is not installed; install one of {', '.join(PEERS)}")
    make = import_module(PEERS[peer]).AdamW8bit
    for bucket in optimizer.buckets:
        decay = optimizer.settings.weight_decay if decays(bucket.names[0], bucket.parameters[0]) else 0.0
        bucket.updater = PeerUpdater(bucket.masters, make, optimizer.settings, decay)


class PeerUpdater:
    """Some torch optimizer as an updater of weights, gradients and moments."""

    needs_gradients_in_weight_dtype = True
    device_numbers: Tensor | None = None

    def __init__(
        self, weights: list[Tensor], make: Callable[..., torch.optim.Optimizer], settings: Optimizer, decay: float
    ) -> None:
        self.weights, self.weight_decay, self.counts = weights, decay, [0] * len(weights)
        self.optimizer = make(weights, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=decay)

    def update(
        self, gradients: Sequence[Tensor | None], copies: Sequence[Tensor] | None, lr: float, factor: Tensor | None
    ) -> None:
        """Gradients are multiplied first; torchao wants its learning rate in a tensor."""
        self.counts = [count + 1 for count in self.counts]
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient if gradient is None or factor is None else gradient * factor
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self.optimizer.step()
        if copies is not None:
            torch._foreach_copy_(list(copies), self.weights)

    def states(self, index: int) -> dict[str, Tensor]:
        """Plain tensors; of quantized ones, codes and scales."""
        found: dict[str, Tensor] = {}
        for kind, value in self.optimizer.state[self.weights[index]].items():
            if kind in SHARED or not isinstance(value, Tensor):
                continue
            parts = {f"{kind}_{part}": getattr(value, part) for part in PARTS if hasattr(value, part)}
            found |= parts or {kind: value}
        return found

    def step(self, index: int) -> Tensor:
        """How often it has been updated."""
        return torch.tensor(float(self.counts[index]))

    def set_step(self, index: int, step: Tensor) -> None:
        """The number that is told; what the peer divides by is in its own states."""
        self.counts[index] = int(step.item())

    def counters(self) -> list[Tensor]:
        """None on the device."""
        return []
