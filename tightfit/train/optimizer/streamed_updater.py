"""The updater of matrices whose states live on the host: our AdamW kernels, over pieces that pass through the GPU.

What of a matrix lives there: moments always; the float32 master where there is one; and where weights are offloaded
too, the weight itself, of which nothing stays on the GPU but what weight streaming brings. Rows are updated by the
kernels that update states on the GPU, so the result is theirs to the bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from tightfit.jobs.job import Optimizer
from tightfit.jobs.state_format import Format
from tightfit.kernels.adamw import Numbers
from tightfit.kernels.stochastic_rounding import key_of
from tightfit.levers.host_update import HostWork
from tightfit.levers.optimizer_states import StateKind, States, state_kind
from tightfit.levers.state_link import Home, StateLink, Update
from tightfit.levers.weight_streaming import WEIGHT
from tightfit.memory.host import host_empty


@dataclass
class Resident:
    """One matrix: its home on the host, and itself on the GPU where it is updated there."""

    name: str
    home: Home
    kind: StateKind
    states: States
    here: Tensor | None
    """What is updated where it lies; None where that is on the host too."""
    late: bool
    step: int = 0


@dataclass
class StreamedUpdater:
    """Moments of `form` of some matrices, all on the host, updated through `link`."""

    link: StateLink
    form: Format
    settings: Optimizer
    weight_decay: float
    seed: int | None = None
    """Weights are rounded stochastically, with bits that follow from this."""
    wants_own_dtype: bool = False
    residents: list[Resident] = field(default_factory=list)

    def add(self, name: str, weight: Tensor, *, on_host: bool, late: bool) -> Home:
        """Take on `weight`, which passes through the GPU like its states where it is `on_host`."""
        home = Home(weight.numel() // weight.shape[-1], weight.shape[-1])
        if on_host:
            home.add(WEIGHT, weight)
        kind = state_kind(self.form, weight)
        states = kind.zeros(weight, self._zeros)
        for each, tensor in states.items():
            home.add(each, tensor)
        self.link.adopt(home)
        self.residents.append(Resident(name, home, kind, states, None if on_host else weight, late))
        return home

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return host_empty(shape, dtype, self.link.device, "optimizer states").zero_()

    def update(
        self, gradients: Sequence[Tensor | None], copies: Sequence[Tensor] | None, lr: float, factor: Tensor | None
    ) -> None:
        """Send every matrix on its way; the result is there when its home is settled."""
        factor = None if factor is None else factor.float()
        for index, (each, gradient) in enumerate(zip(self.residents, gradients, strict=True)):
            if gradient is None:
                continue
            each.step += 1
            copy = None if copies is None or each.home.weight_away else _rows(copies[index].data, each.home)
            flat, numbers = _rows(gradient, each.home), self._numbers(each, lr)
            run = partial(_update_rows, each, flat, copy, factor, numbers)
            reads = (flat,) if factor is None else (flat, factor)
            update = Update(each.home, run, gradient, reads)
            if self.form == "fp32" and each.here is None:
                update.on_host = HostWork(each.home.tensors, flat, copy, factor, numbers, each.home.rows_per_piece)
            self.link.submit(update, late=each.late)

    def _numbers(self, each: Resident, lr: float) -> Numbers:
        s = self.settings
        key = None if self.seed is None else key_of(self.seed, each.name, each.step)
        return Numbers(lr, *s.betas, s.eps, self.weight_decay, each.step, key)

    def states(self, index: int) -> States:
        """On the host, up to date after `link.synchronize`."""
        return self.residents[index].states

    def step(self, index: int) -> Tensor:
        """Kept on the host, which needs it for the bias corrections."""
        return torch.tensor(float(self.residents[index].step), dtype=torch.float32)

    def set_step(self, index: int, step: Tensor) -> None:
        """Read from wherever it was loaded to."""
        self.residents[index].step = int(step.item())

    def counters(self) -> list[Tensor]:
        """None: they are on the host."""
        return []


def _update_rows(
    each: Resident, gradient: Tensor, copy: Tensor | None, factor: Tensor | None, numbers: Numbers,
    staged: dict[str, Tensor], rows: slice,
) -> None:  # fmt: skip
    """AdamW on some rows."""
    weight = staged[WEIGHT] if each.here is None else _rows(each.here.data, each.home)[rows]
    states = {kind: tensor for kind, tensor in staged.items() if kind != WEIGHT}
    numbers = numbers._replace(first=rows.start * each.home.width)
    each.kind.update(weight, None if copy is None else copy[rows], gradient[rows], states, factor, numbers)


def _rows(tensor: Tensor, home: Home) -> Tensor:
    return tensor.reshape(home.rows, home.width)
