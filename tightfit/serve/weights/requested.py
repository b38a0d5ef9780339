"""RequestedWeight: a matrix, and the LoRA adapters that requests choose by name.

    y = W x + b, and each row gets B (A x) of the adapter that its request asked for

Which rows those are is the same for all matrices of a step: a `Choice`, made once. Steps without adapters run as they
would if there were none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightfit.kernels.decoding.low_rank_rows import LowRankRows, low_rank_rows, low_rank_rows_eager
from tightfit.kernels.mlp.glu import glu
from tightfit.models.huggingface.adapter import Adapter
from tightfit.models.spec import Activation
from tightfit.serve.schedule.step import Step
from tightfit.serve.weights.weight import Fused, Weight

FEW_ROWS = 512
"""Rows up to which a kernel adds to each by itself; more are multiplied together, adapter by adapter."""


class Choice:
    """The adapters that the rows of the running step use."""

    def __init__(self, adapters: Mapping[str, Adapter], *, overlap: bool) -> None:
        """With `overlap`, kernels begin while the one before them ends."""
        self.adapters, self.overlap = adapters, overlap
        self.numbers = {name: number for number, name in enumerate(adapters)}
        self._of_row: Tensor | None = None
        self._rows: dict[int, Tensor] | None = None

    @property
    def is_none(self) -> bool:
        """Whether no row uses any."""
        return self._of_row is None

    def make(self, step: Step) -> None:
        """Choose for the tokens of `step`; a draft model has no adapters, and guesses without."""
        self._of_row, self._rows = step.adapter_of, None
        if rows := {self.numbers[name]: own for name, own in step.adapters.items() if name in self.numbers}:
            count = step.tokens.shape[1]
            self._of_row = torch.full((count,), -1, device=step.tokens.device)
            for number, own in rows.items():
                self._of_row.index_fill_(0, own, number)
            self._rows = rows if count > FEW_ROWS else None

    def narrow(self, rows: Tensor) -> None:
        """From now on these rows of the step are all there are."""
        if self._of_row is not None:
            self._of_row, self._rows = self._of_row.index_select(0, rows), None

    def add(self, y: Tensor, x: Tensor, matrices: LowRankRows) -> None:
        """Add to the rows of y what their adapters make of those of x."""
        assert self._of_row is not None
        if self._rows is not None:
            low_rank_rows_eager(y, x, self._rows, matrices)
        else:
            low_rank_rows(y, x, self._of_row, matrices, overlap=self.overlap)


@dataclass(frozen=True, eq=False)
class RequestedWeight(Weight):
    """A matrix or several of one input, with what adapters add."""

    base: Weight
    matrices: LowRankRows
    choice: Choice

    def product(self, x: Tensor) -> Tensor:
        y = self.base.product(x)
        if not self.choice.is_none:
            self.choice.add(y, x, self.matrices)
        return y

    def gated_product(self, x: Tensor, activation: Activation) -> Tensor:
        if self.choice.is_none:
            return self.base.gated_product(x, activation)
        return super().gated_product(x, activation)

    def product_of_gated(self, gate_up: Weight, x: Tensor, activation: Activation) -> Tensor:
        if self.choice.is_none:
            return self.base.product_of_gated(base_of(gate_up), x, activation)
        return super().product_of_gated(gate_up, x, activation)

    def one_token(self, x: Tensor, fused: Fused) -> Tensor:
        if self.choice.is_none:
            return self.base.one_token(x, fused)
        x = fused.normed(x)
        y = self.base.one_token(x, replace(fused, norm=None, activation=None, residual=None))
        self.choice.add(y, x, self.matrices)
        if fused.activation is not None:
            gate, up = y.chunk(2, dim=-1)
            y = glu(gate, up, fused.activation)
        return y if fused.residual is None else y + fused.residual


def base_of(weight: Weight) -> Weight:
    """The matrix without what requests add to it."""
    return weight.base if isinstance(weight, RequestedWeight) else weight


def with_requested(base: Weight, names: Sequence[str], outputs: Sequence[int], choice: Choice) -> Weight:
    """`base`, the joint weight of the decoder's modules `names`, with what adapters add to those."""
    pairs = [
        [(change.down, change.up) if (change := adapter.changes.get(name)) is not None else None for name in names]
        for adapter in choice.adapters.values()
    ]
    if all(pair is None for each in pairs for pair in each):
        return base
    return RequestedWeight(base, LowRankRows.of(pairs, outputs), choice)
