"""The updater of matrices with offloaded states: our AdamW kernels on pieces that are copied to the GPU and back.

The moments, the float32 master if there is one and, where weights are offloaded, the weight itself are in host memory.
The kernels are those that update states on the GPU, so the results are bit for bit the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from tightfit.jobs.job import Optimizer
from tightfit.jobs.state_format import Format
from tightfit.kernels.optimizer.adamw import Numbers
from tightfit.levers.host_update import HostWork
from tightfit.levers.optimizer_states import state_kind
from tightfit.levers.state_link import OffloadedMatrix, StateLink, Update
from tightfit.levers.weight_streaming import WEIGHT
from tightfit.memory.host import host_empty
from tightfit.train.optimizer.updaters import Entry, EntryUpdater


@dataclass(kw_only=True)
class _OffloadedEntry(Entry):
    """One matrix with its host tensors."""

    matrix: OffloadedMatrix
    weight_on_gpu: Tensor | None
    """The weight, if it is updated in place on the GPU; None if it is on the host like its states."""
    deferred: bool


@dataclass
class StreamedUpdater(EntryUpdater[_OffloadedEntry]):
    """AdamW of matrices whose moments, in format `form`, are on the host behind `link`."""

    link: StateLink
    form: Format
    settings: Optimizer
    weight_decay: float
    seed: int | None = None
    """Seed of stochastic rounding; None rounds to nearest."""
    after_update: Callable[[], None] | None = None
    """Called after the compute stream waits for an update's event."""
    needs_gradients_in_weight_dtype: bool = False
    entries: list[_OffloadedEntry] = field(default_factory=list)

    def add(self, name: str, weight: Tensor, *, on_host: bool, deferred: bool, first: int = 0) -> OffloadedMatrix:
        """Add a matrix; with `on_host` the weight (or master) itself is copied to the GPU and back like its states.

        Of a shard, `first` is the index of its first element in the whole weight.
        """
        matrix = OffloadedMatrix(rows=weight.numel() // weight.shape[-1], width=weight.shape[-1])
        if on_host:
            matrix.add(WEIGHT, weight)
        kind = state_kind(self.form, weight)
        states = kind.zeros(weight, self._zeros)
        for each, tensor in states.items():
            matrix.add(each, tensor)
        self.link.reserve(matrix)
        self.entries.append(
            _OffloadedEntry(
                name=name,
                matrix=matrix,
                kind=kind,
                states=states,
                weight_on_gpu=None if on_host else weight,
                deferred=deferred,
                first=first,
            )
        )
        return matrix

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return host_empty(shape, dtype, self.link.device, "optimizer states").zero_()

    def update(
        self, gradients: Sequence[Tensor | None], copies: Sequence[Tensor] | None, lr: float, factor: Tensor | None
    ) -> None:
        """Queue the updates; `link.wait_until_updated` waits for that of one matrix."""
        factor = None if factor is None else factor.float()
        for index, (entry, gradient) in enumerate(zip(self.entries, gradients, strict=True)):
            if gradient is None:
                continue
            entry.step += 1
            has_copy = copies is not None and not entry.matrix.weight_offloaded
            copy = _rows(copies[index].data, entry.matrix) if copies is not None and has_copy else None
            self.link.submit(self._update_of(entry, gradient, copy, lr, factor), deferred=entry.deferred)

    def _update_of(
        self, entry: _OffloadedEntry, gradient: Tensor, copy: Tensor | None, lr: float, factor: Tensor | None
    ) -> Update:
        matrix, rows = entry.matrix, _rows(gradient, entry.matrix)
        numbers = self._numbers(entry, lr)
        update = Update(
            matrix=matrix,
            run=partial(_update_rows, entry, rows, copy, factor, numbers),
            gradient=gradient,
            after=self.after_update,
        )
        if self.form == "fp32" and entry.weight_on_gpu is None:
            update.on_host = HostWork(
                states=matrix.tensors,
                gradient=rows,
                copy=copy,
                factor=factor,
                numbers=numbers,
                rows_per_piece=matrix.rows_per_piece,
            )
        return update


def _update_rows(
    entry: _OffloadedEntry,
    gradient: Tensor,
    copy: Tensor | None,
    factor: Tensor | None,
    numbers: Numbers,
    staged: dict[str, Tensor],
    rows: slice,
) -> None:
    """AdamW on some rows, whose host tensors are `staged` on the GPU."""
    resident = entry.weight_on_gpu
    weight = staged[WEIGHT] if resident is None else _rows(resident.data, entry.matrix)[rows]
    states = {kind: tensor for kind, tensor in staged.items() if kind != WEIGHT}
    numbers = numbers._replace(first=entry.first + rows.start * entry.matrix.width)
    entry.kind.update(weight, None if copy is None else copy[rows], gradient[rows], states, factor, numbers)


def _rows(tensor: Tensor, matrix: OffloadedMatrix) -> Tensor:
    return tensor.reshape(matrix.rows, matrix.width)
