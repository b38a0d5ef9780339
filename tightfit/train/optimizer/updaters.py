"""Updaters: who makes the AdamW update of a bucket of weights. Torch's fused one, or our kernels for other formats.

Both keep a step count and states per weight; a weight without a gradient is left as it is, and its count too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tightfit.jobs.job import Optimizer
from tightfit.jobs.state_format import Format
from tightfit.kernels.adamw import Numbers
from tightfit.kernels.adamw_list import adamw_list
from tightfit.kernels.stochastic_rounding import key_of
from tightfit.kernels.triton_support import use_triton
from tightfit.levers.optimizer_states import StateKind, States, state_kind, zeros_beside

MOMENTS = ("exp_avg", "exp_avg_sq")


class Updater(Protocol):
    """What an optimizer needs of either."""

    wants_own_dtype: bool
    """Gradients must have the dtype of the weights they update."""

    def update(
        self, gradients: Sequence[Tensor | None], copies: Sequence[Tensor] | None, lr: float, factor: Tensor | None
    ) -> None:
        """Update with gradients multiplied by `factor`, and write the result to `copies` as well."""

    def states(self, index: int) -> States:
        """The state tensors of a weight by kind, without its step count."""

    def step(self, index: int) -> Tensor:
        """Updates that a weight has had, as a float32 tensor."""

    def set_step(self, index: int, step: Tensor) -> None:
        """Go on from there."""

    def counters(self) -> list[Tensor]:
        """Step counts that take memory on the device."""


class TorchUpdater:
    """Torch's AdamW, over weights, gradients and moments of one dtype; on GPUs made by our kernel, which is faster."""

    wants_own_dtype = True

    def __init__(self, weights: list[Tensor], settings: Optimizer, weight_decay: float) -> None:
        s = settings
        self.weights, self.counts = weights, [0] * len(weights)
        self.adamw = torch.optim.AdamW(
            weights, lr=s.lr, betas=s.betas, eps=s.eps, weight_decay=weight_decay, fused=True
        )
        for weight in weights:
            zeros = {moment: torch.zeros_like(weight, memory_format=torch.preserve_format) for moment in MOMENTS}
            self.adamw.state[weight] = {"step": torch.zeros((), dtype=torch.float32, device=weight.device), **zeros}

    def update(
        self, gradients: Sequence[Tensor | None], copies: Sequence[Tensor] | None, lr: float, factor: Tensor | None
    ) -> None:
        """All weights in one launch."""
        if self.weights and use_triton("auto", self.weights[0]):
            self._launch(gradients, lr, factor)
        else:
            self._step(gradients, lr, factor)
        for index, gradient in enumerate(gradients):
            self.counts[index] += gradient is not None
        if copies is not None:
            torch._foreach_copy_(list(copies), self.weights)

    def _launch(self, gradients: Sequence[Tensor | None], lr: float, factor: Tensor | None) -> None:
        """Weights that have had as many updates together, which are all but those that some steps do not reach."""
        settings = self.adamw.param_groups[0]
        beta1, beta2 = settings["betas"]
        factor = None if factor is None else factor.float()
        for count in sorted(set(self.counts)):
            pairs = [(i, g) for i, g in enumerate(gradients) if g is not None and self.counts[i] == count]
            if pairs:
                weights, own = [self.weights[i] for i, _ in pairs], [g for _, g in pairs]
                held = [self.adamw.state[weight] for weight in weights]
                m, v = ([states[moment] for states in held] for moment in MOMENTS)
                numbers = Numbers(lr, beta1, beta2, settings["eps"], settings["weight_decay"], count + 1)
                adamw_list(weights, own, m, v, factor, numbers)
                torch._foreach_add_([states["step"] for states in held], 1)

    def _step(self, gradients: Sequence[Tensor | None], lr: float, factor: Tensor | None) -> None:
        """The factor's reciprocal is divided by inside the fused update."""
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        self.adamw.grad_scale = None if factor is None else factor.float().reciprocal()  # type: ignore[attr-defined]
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()

    def states(self, index: int) -> States:
        """Both moments."""
        held = self.adamw.state[self.weights[index]]
        return {moment: held[moment] for moment in MOMENTS}

    def step(self, index: int) -> Tensor:
        """Torch keeps it on the device."""
        count: Tensor = self.adamw.state[self.weights[index]]["step"]
        return count

    def set_step(self, index: int, step: Tensor) -> None:
        """Copied to the device, and known on the host."""
        self.step(index).copy_(step)
        self.counts[index] = int(step.item())

    def counters(self) -> list[Tensor]:
        """One each."""
        return [self.step(index) for index in range(len(self.weights))]


@dataclass
class Slot:
    """One weight with its states."""

    weight: Tensor
    kind: StateKind
    states: States
    name: str
    first: int
    """The number of the first element that is here."""
    step: int = 0


@dataclass
class FormatUpdater:
    """Our kernels: moments of any format, gradients as they are, weights rounded stochastically where asked."""

    names: list[str]
    weights: list[Tensor]
    form: Format
    settings: Optimizer
    weight_decay: float
    firsts: list[int]
    seed: int | None = None
    """Weights are rounded stochastically, with bits that follow from this."""
    wants_own_dtype: bool = False
    slots: list[Slot] = field(init=False)

    def __post_init__(self) -> None:
        self.slots = []
        for name, weight, first in zip(self.names, self.weights, self.firsts, strict=True):
            kind = state_kind(self.form, weight)
            self.slots.append(Slot(weight, kind, kind.zeros(weight, zeros_beside(weight)), name, first))

    def update(
        self, gradients: Sequence[Tensor | None], copies: Sequence[Tensor] | None, lr: float, factor: Tensor | None
    ) -> None:
        """One weight after another; each is one launch."""
        factor = None if factor is None else factor.float()
        for index, (slot, gradient) in enumerate(zip(self.slots, gradients, strict=True)):
            if gradient is not None:
                slot.step += 1
                copy = None if copies is None else copies[index]
                slot.kind.update(slot.weight, copy, gradient, slot.states, factor, self._numbers(slot, lr))

    def _numbers(self, slot: Slot, lr: float) -> Numbers:
        s = self.settings
        key = None if self.seed is None else key_of(self.seed, slot.name, slot.step)
        return Numbers(lr, *s.betas, s.eps, self.weight_decay, slot.step, key, slot.first)

    def states(self, index: int) -> States:
        """Whatever the format keeps."""
        return self.slots[index].states

    def step(self, index: int) -> Tensor:
        """Kept on the host, which needs it for the bias corrections."""
        return torch.tensor(float(self.slots[index].step), dtype=torch.float32)

    def set_step(self, index: int, step: Tensor) -> None:
        """Read from wherever it was loaded to."""
        self.slots[index].step = int(step.item())

    def counters(self) -> list[Tensor]:
        """None: they are on the host."""
        return []
