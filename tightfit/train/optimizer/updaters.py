"""Updaters run the AdamW update of a bucket of weights: torch's fused AdamW, or our kernels for other state formats.

Both keep states and a step count per weight; a weight without a gradient is skipped and its count stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tightfit.jobs.job import Optimizer
from tightfit.jobs.state_format import Format
from tightfit.kernels.optimizer.adamw import Numbers
from tightfit.kernels.optimizer.adamw_list import adamw_list
from tightfit.kernels.optimizer.stochastic_rounding import key_of
from tightfit.kernels.triton_support import use_triton
from tightfit.levers.optimizer_states import StateKind, States, state_kind, zeros_on_device_of

MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw_numbers(settings: Optimizer, lr: float, *, weight_decay: float, step: int, key: int | None = None) -> Numbers:
    """The scalars of one AdamW update."""
    beta1, beta2 = settings.betas
    return Numbers(lr=lr, beta1=beta1, beta2=beta2, eps=settings.eps, weight_decay=weight_decay, step=step, key=key)


class DeviceNumbers:
    """The scalars of AdamW that change from step to step, in device memory: a row for each weight decay.

    The updates in a CUDA graph read this table; call `fill` before each replay.
    """

    def __init__(self, settings: Optimizer, weight_decays: Sequence[float], device: torch.device) -> None:
        self.settings, self.weight_decays = settings, sorted(set(weight_decays))
        self.table = torch.zeros(len(self.weight_decays), 3, device=device)

    def of(self, weight_decay: float) -> Tensor:
        """The row that kernels read for this weight decay."""
        return self.table[self.weight_decays.index(weight_decay)]

    def fill(self, lr: float, step: int) -> None:
        """Copy the scalars of update number `step` to the device."""
        numbers = (adamw_numbers(self.settings, lr, weight_decay=each, step=step) for each in self.weight_decays)
        values = torch.tensor([each.scalars[:3] for each in numbers])
        self.table.copy_(values.pin_memory() if self.table.is_cuda else values, non_blocking=True)


class Updater(Protocol):
    """The interface of all updaters."""

    needs_gradients_in_weight_dtype: bool
    """Gradients must be cast to the dtype of the weights they update."""
    weight_decay: float
    counts: list[int]
    """How often each weight has been updated."""
    device_numbers: Tensor | None
    """The row of `DeviceNumbers` for its weight decay while a graph is captured, else None."""

    def update(
        self, gradients: Sequence[Tensor | None], copies: Sequence[Tensor] | None, lr: float, factor: Tensor | None
    ) -> None:
        """Update with gradients times `factor`, and copy the new weights to `copies` (16-bit parameters)."""

    def states(self, index: int) -> States:
        """The state tensors of a weight by kind, without its step count."""

    def step(self, index: int) -> Tensor:
        """The step count of a weight as a float32 tensor."""

    def set_step(self, index: int, step: Tensor) -> None:
        """Set the step count of a weight."""

    def counters(self) -> list[Tensor]:
        """The step counts that are tensors on the device."""


class TorchUpdater:
    """Torch's AdamW for weights, gradients and moments of one dtype; on GPUs run by our faster multi-tensor kernel.

    A factor of NaN changes nothing on the device. The host learns of it later, and then calls `uncount`.
    """

    needs_gradients_in_weight_dtype = True

    device_numbers: Tensor | None = None

    def __init__(self, weights: list[Tensor], settings: Optimizer, weight_decay: float) -> None:
        self.weights, self.counts = weights, [0] * len(weights)
        self.last_counted: list[int] = []
        self.settings, self.weight_decay = settings, weight_decay
        self.adamw = torch.optim.AdamW(
            weights, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=weight_decay, fused=True
        )
        for weight in weights:
            zeros = {moment: torch.zeros_like(weight, memory_format=torch.preserve_format) for moment in MOMENTS}
            self.adamw.state[weight] = {"step": torch.zeros((), dtype=torch.float32, device=weight.device), **zeros}

    def update(
        self, gradients: Sequence[Tensor | None], copies: Sequence[Tensor] | None, lr: float, factor: Tensor | None
    ) -> None:
        """Update all weights in one launch."""
        if self.weights and use_triton("auto", self.weights[0]):
            self._triton_step(gradients, lr, factor)
        else:
            self._torch_step(gradients, lr, factor)
        self.last_counted = [index for index, gradient in enumerate(gradients) if gradient is not None]
        for index in self.last_counted:
            self.counts[index] += 1
        if copies is not None:
            torch._foreach_copy_(list(copies), self.weights)

    def uncount(self) -> None:
        """Take back the counts of the last update, whose factor was NaN."""
        for index in self.last_counted:
            self.counts[index] -= 1

    def _triton_step(self, gradients: Sequence[Tensor | None], lr: float, factor: Tensor | None) -> None:
        """One launch per step count, which sets the bias correction. Counts differ where weights were skipped."""
        factor = None if factor is None else factor.float()
        for count in sorted(set(self.counts)):
            pairs = [(i, g) for i, g in enumerate(gradients) if g is not None and self.counts[i] == count]
            if pairs:
                weights, own = [self.weights[i] for i, _ in pairs], [g for _, g in pairs]
                states = [self.adamw.state[weight] for weight in weights]
                m, v = ([state[moment] for state in states] for moment in MOMENTS)
                numbers = adamw_numbers(self.settings, lr, weight_decay=self.weight_decay, step=count + 1)
                adamw_list(weights, own, m, v, factor, numbers._replace(on_device=self.device_numbers))

    def _torch_step(self, gradients: Sequence[Tensor | None], lr: float, factor: Tensor | None) -> None:
        """Torch's fused AdamW divides gradients by `grad_scale`, so that is the factor's reciprocal."""
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        self.adamw.grad_scale = None if factor is None else factor.float().reciprocal()  # type: ignore[attr-defined]
        self.adamw.found_inf = None if factor is None else factor.isnan().float()  # type: ignore[attr-defined]
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()

    def states(self, index: int) -> States:
        """Both moments of a weight."""
        state = self.adamw.state[self.weights[index]]
        return {moment: state[moment] for moment in MOMENTS}

    def step(self, index: int) -> Tensor:
        """The step count, as the host knows it."""
        return torch.tensor(float(self.counts[index]), dtype=torch.float32)

    def set_step(self, index: int, step: Tensor) -> None:
        """Set the step count on the host, and on the device for torch."""
        self.counters()[index].copy_(step)
        self.counts[index] = int(step.item())

    def counters(self) -> list[Tensor]:
        """The step tensors of torch's AdamW, one per weight; our kernel needs none."""
        return [self.adamw.state[weight]["step"] for weight in self.weights]


@dataclass(kw_only=True)
class Entry:
    """One weight's states and its step count, which is kept on the host for the bias corrections."""

    name: str
    kind: StateKind
    states: States
    first: int = 0
    """Index, in the whole weight, of the first element of this rank's shard."""
    step: int = 0


EntryType = TypeVar("EntryType", bound=Entry)


class EntryUpdater(Generic[EntryType]):
    """Base of the updaters that run our kernels: an entry for each weight."""

    entries: list[EntryType]
    settings: Optimizer
    weight_decay: float
    seed: int | None
    device_numbers: Tensor | None = None

    @property
    def counts(self) -> list[int]:
        """How often each weight has been updated."""
        return [entry.step for entry in self.entries]

    @counts.setter
    def counts(self, counts: list[int]) -> None:
        for entry, count in zip(self.entries, counts, strict=True):
            entry.step = count

    def _numbers(self, entry: EntryType, lr: float) -> Numbers:
        key = None if self.seed is None else key_of(self.seed, entry.name, entry.step)
        numbers = adamw_numbers(self.settings, lr, weight_decay=self.weight_decay, step=entry.step, key=key)
        return numbers._replace(on_device=self.device_numbers)

    def states(self, index: int) -> States:
        """The state tensors of a weight by kind; those on the host are up to date after `link.synchronize`."""
        return self.entries[index].states

    def step(self, index: int) -> Tensor:
        """The step count."""
        return torch.tensor(float(self.entries[index].step), dtype=torch.float32)

    def set_step(self, index: int, step: Tensor) -> None:
        """Set the step count."""
        self.entries[index].step = int(step.item())

    def counters(self) -> list[Tensor]:
        """No step counts on the device."""
        return []


@dataclass(kw_only=True)
class _GpuEntry(Entry):
    weight: Tensor


@dataclass
class FormatUpdater(EntryUpdater[_GpuEntry]):
    """Our kernels: moments of any format, gradients of any dtype, optional stochastic rounding."""

    names: list[str]
    weights: list[Tensor]
    form: Format
    settings: Optimizer
    weight_decay: float
    firsts: list[int]
    seed: int | None = None
    """Seed of stochastic rounding; None rounds to nearest."""
    needs_gradients_in_weight_dtype: bool = False
    entries: list[_GpuEntry] = field(init=False)

    def __post_init__(self) -> None:
        self.entries = []
        for name, weight, first in zip(self.names, self.weights, self.firsts, strict=True):
            kind = state_kind(self.form, weight)
            states = kind.zeros(weight, zeros_on_device_of(weight))
            self.entries.append(_GpuEntry(weight=weight, kind=kind, states=states, name=name, first=first))

    def update(
        self, gradients: Sequence[Tensor | None], copies: Sequence[Tensor] | None, lr: float, factor: Tensor | None
    ) -> None:
        """Update the weights, one launch each."""
        factor = None if factor is None else factor.float()
        for index, (entry, gradient) in enumerate(zip(self.entries, gradients, strict=True)):
            if gradient is not None:
                entry.step += 1
                copy = None if copies is None else copies[index]
                numbers = self._numbers(entry, lr)._replace(first=entry.first)
                entry.kind.update(entry.weight, copy, gradient, entry.states, factor, numbers)
