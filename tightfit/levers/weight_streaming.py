"""Weights that live on the host: a layer's come to the GPU just before it runs, while the layer before it does.

Two slots of GPU memory take turns. Parameters of layer i are views of slot i mod 2 for good; only what is in the slot
changes, so autograd, hooks and the optimizer see parameters as ever. Backward runs each layer again (all must be
recomputed: nothing may remember weights that have left) and goes through them in the other order; the last two are
still there. Where the host has float32 masters these are what travels, narrowed on arrival: 4 bytes a weight on the
link instead of 2, and no second copy on the host.
The embedding, the head and vectors stay on the GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.levers.policy.offload import WEIGHT_SLOTS
from tightfit.levers.side_stream import Mark, SideStream, current_waits_for
from tightfit.levers.state_link import ALIGNMENT, Home, StateLink
from tightfit.memory.host import claimed

WEIGHT = "weight"


@dataclass
class Streamed:
    """One parameter, and where its values come from."""

    parameter: nn.Parameter
    home: Home


@dataclass
class _Slot:
    memory: Tensor
    layer: int | None = None
    updates: tuple[int, ...] = ()
    """How many updates the weights had had when they were loaded."""
    loaded: Mark = None
    parts: list[Tensor] = field(default_factory=list)


class WeightStream:
    """Brings the weights of layers that are about to run; in backward, those below."""

    def __init__(self, streamed: Sequence[Sequence[Streamed]], dtype: torch.dtype, link: StateLink) -> None:
        self.streamed, self.link, device = streamed, link, link.device
        self.loader = SideStream(device, first=True)  # its kernels narrow masters, piece by piece
        size = max(sum(_room(each.parameter.numel() * dtype.itemsize) for each in layer) for layer in streamed)
        self.slots = [_Slot(self._memory(size, "weights", "of two layers")) for _ in range(WEIGHT_SLOTS)]
        narrowed = any(each.home.tensors[WEIGHT].dtype != dtype for layer in streamed for each in layer)
        pieces = [each.home.tensors[WEIGHT][: each.home.rows_per_piece] for layer in streamed for each in layer]
        widest = max(piece.nbytes for piece in pieces) if narrowed else 0
        self.staging = self._memory(widest, "workspace", "masters on their way")
        for index in range(len(streamed)):
            self._settle_in(index, dtype)

    def wrap(self, layers: Sequence[nn.Module]) -> None:
        """Bring weights before each layer's forward as it is now; recomputing must come around that."""
        for index, layer in enumerate(layers):
            layer.forward = partial(self._run, index, layer.forward)

    def _memory(self, size: int, component: Any, detail: str) -> Tensor:
        return claimed(torch.empty(size, dtype=torch.uint8, device=self.link.device), component, detail)

    def _settle_in(self, index: int, dtype: torch.dtype) -> None:
        """Give the layer's parameters their places in its slot."""
        at, memory = 0, self.slots[index % WEIGHT_SLOTS].memory
        for each in self.streamed[index]:
            size = each.parameter.numel() * dtype.itemsize
            each.parameter.data = memory[at : at + size].view(dtype).view(each.parameter.shape)
            at += _room(size)

    def _run(self, index: int, forward: Any, *arguments: Any, **options: Any) -> Any:
        self._bring(index)
        current_waits_for(self.slots[index % WEIGHT_SLOTS].loaded)
        following = index - 1 if _in_backward() else index + 1
        if 0 <= following < len(self.streamed):
            self._bring(following)
        return forward(*arguments, **options)

    def _bring(self, index: int) -> None:
        """Load a layer unless it is there, as it is now on the host, once its slot is not used any more."""
        for each in self.streamed[index]:
            self.link.hurry(each.home)
        slot, updates = self.slots[index % WEIGHT_SLOTS], tuple(each.home.updates for each in self.streamed[index])
        if (slot.layer, slot.updates) == (index, updates):
            return
        slot.layer, slot.updates = index, updates
        self.loader.wait_for_current()
        for each in self.streamed[index]:
            self.link.wait_for_host(each.home)
            self.loader.wait_for(each.home.settled)
            with self.loader, torch.no_grad():
                self._load(each)
        slot.loaded = self.loader.mark()

    def _load(self, each: Streamed) -> None:
        source, home = each.home.tensors[WEIGHT], each.home
        target = each.parameter.data.view(home.rows, home.width)
        if source.dtype == target.dtype:
            target.copy_(source, non_blocking=True)
            return
        for begin in range(0, home.rows, home.rows_per_piece):
            piece = source[begin : begin + home.rows_per_piece]
            staged = self.staging[: piece.nbytes].view(piece.dtype).view(piece.shape)
            staged.copy_(piece, non_blocking=True)
            target[begin : begin + home.rows_per_piece].copy_(staged)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _room(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
