"""Activation checkpointing: keep a layer's input (and what is dear to compute), run the rest of it again in backward.

Chen et al. 2016; selectively, Korthikanti et al. 2022. Applied from outside by giving layers a `forward` that
checkpoints; names and weights stay as they are. Which layers keep how much is decided by levers/policy, which
memory/formulas/keeping.py tells about the shapes a forward pass meets; how by checkpoint_keep.py, where inputs wait by
checkpoint_store.py.
Torch's non-reentrant checkpoint does the rest: random numbers are those of the first time, computing stops when all
that backward needs is there, and weights that FSDP2 has gathered for backward are the ones used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.levers.checkpoint_keep import Keeper
from tightfit.levers.checkpoint_store import HostStore, Waiting
from tightfit.levers.policy.recompute import KeepLevel, is_checkpointed
from tightfit.memory.formulas.keeping import levels_of
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.models.decoder import Decoder, Layer

ALONE = Layout()
Forward = Callable[..., tuple[Tensor, Tensor | None]]


def checkpoint_layers(model: Decoder, levers: Levers, layout: Layout = ALONE) -> None:
    """Compute layers again in backward as `levers` say, on a rank of `layout`."""
    if not is_checkpointed(levers):
        return
    checkpointing = Checkpointing(model, levers, layout)
    for place, layer in enumerate(model.layers):
        layer.forward = partial(checkpointing.run, place, layer.forward)


@dataclass(frozen=True)
class Chosen:
    """What each layer keeps, and for each the number of recomputed ones before it."""

    levels: tuple[KeepLevel, ...]
    before: tuple[int, ...]

    @property
    def count(self) -> int:
        """Layers that are computed again."""
        return self.before[-1] + (self.levels[-1] != "everything")


class Checkpointing:
    """Runs the layers of one model, each as far from memory as it was chosen to be."""

    def __init__(self, model: Decoder, levers: Levers, layout: Layout) -> None:
        self.spec, self.levers, self.layout = model.spec, levers, layout
        self.numbers = tuple(cast(Layer, layer).attention.layer for layer in model.layers)
        self.store: HostStore | None = None
        if levers.offload_checkpoints:
            self.store = HostStore(levers.checkpoint_host_bytes, levers.checkpoint_format)
        self.chosen = lru_cache(maxsize=64)(self._choose)

    def _choose(self, rows: int, length: int, element_bytes: int) -> Chosen:
        layout = self.layout
        split = layout.sequence_parallel and layout.tensor > 1
        shape = LocalShape(
            rows=rows,
            length=length * (layout.tensor if split else 1),
            element_bytes=element_bytes,
            tensor=layout.tensor,
            sequence_parallel=split,
            context=layout.context,
            expert=layout.expert,
            tiles=self.levers.tiles,
        )
        levels = levels_of(self.spec, self.levers, shape, self.numbers)
        return Chosen(levels, tuple(sum(level != "everything" for level in levels[:i]) for i in range(len(levels))))

    def run(self, place: int, forward: Forward, x: Tensor, *around: Any) -> tuple[Tensor, Tensor | None]:
        """The layer at `place`, whose own forward is `forward`."""
        chosen = self.chosen(*x.shape[:2], x.element_size())
        level = chosen.levels[place]
        if level == "everything" or not torch.is_grad_enabled():
            return forward(x, *around)
        waiting = Waiting(x) if self.store is None else self.store.keep(x, chosen.before[place], chosen.count)
        given = [x]

        def compute(_: Tensor) -> tuple[Tensor, Tensor | None]:
            return forward(given.pop() if given else waiting.fetch(), *around)

        keeper = Keeper(level, skips_last=not (self.spec.sandwich_norms or self.spec.is_routed(self.numbers[place])))
        # The input is not among the arguments, which torch would hold; an empty tensor says whose random numbers count.
        made = checkpoint(compute, x.new_empty(0), use_reentrant=False, context_fn=keeper.contexts)
        assert isinstance(made, tuple)
        return made
