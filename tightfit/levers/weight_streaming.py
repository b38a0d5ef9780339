"""Weight streaming: weights live in host memory, and a layer's are copied to the GPU while the layer before it runs.

Two layer buffers on the GPU alternate. The parameters of layer i are always views of buffer i mod 2; only the buffer's
content changes, so autograd, hooks and the optimizer see ordinary parameters. All layers must be recomputed in backward
(no saved tensor may refer to weights that were overwritten), which runs them in reverse; the last two layers' weights
are still in the buffers. Where the host has float32 masters, these are copied and cast on arrival: 4 bytes a weight on
the link instead of 2, and no second copy in host memory. A cast waits until a running thread block of the step's
kernels ends, so a few pieces may arrive before it. The embedding, the head and vectors stay on the GPU. Shards of FSDP2
are streamed in the same way, to be all-gathered: shard_streaming.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.levers.policy.offload import MASTER_SLOTS, WEIGHT_SLOTS
from tightfit.levers.side_stream import SideStream, StreamEvent, current_stream_waits_for, record_current_stream
from tightfit.levers.state_link import ALIGNMENT, OffloadedMatrix, StateLink
from tightfit.memory.host import claimed

WEIGHT = "weight"


@dataclass
class StreamedParameter:
    """A parameter, and the matrix on the host that its values come from."""

    parameter: nn.Parameter
    matrix: OffloadedMatrix
    target: Tensor | None = None
    """Its rows in a layer buffer."""


@dataclass
class LayerBuffer:
    """GPU memory for the weights of one layer at a time."""

    memory: Tensor
    layer: int | None = None
    update_counts: tuple[int, ...] = ()
    """Update counts of the loaded weights, by which stale ones are noticed."""
    loaded: StreamEvent = None
    gathered: StreamEvent = None
    """Of shards: the event after which the all-gather has read them."""


@dataclass
class ArrivedMasters:
    """Staging memory for a piece of masters on the GPU, to be cast into a layer buffer."""

    memory: Tensor
    free: StreamEvent = None
    """The event after which the piece is cast and the memory free."""


class WeightStream:
    """Prefetches the weights of the next layer; in backward, of the layer below."""

    def __init__(self, streamed: Sequence[Sequence[StreamedParameter]], dtype: torch.dtype, link: StateLink) -> None:
        self.streamed, self.link, device = streamed, link, link.device
        self.loader, self.caster = SideStream(device), SideStream(device, high_priority=True)
        layer_bytes = max(sum(_aligned(self._elements(each) * dtype.itemsize) for each in layer) for layer in streamed)
        self.buffers = [LayerBuffer(self._memory(layer_bytes, "weights", "of two layers")) for _ in range(WEIGHT_SLOTS)]
        sources = [each.matrix.tensors[WEIGHT][: each.matrix.rows_per_piece] for layer in streamed for each in layer]
        piece_bytes = max(source.nbytes for source in sources)
        slots = MASTER_SLOTS if any(source.dtype != dtype for source in sources) else 0
        self.arrived = [
            ArrivedMasters(self._memory(piece_bytes, "workspace", "masters on their way")) for _ in range(slots)
        ]
        self.pieces_cast = 0
        for index in range(len(streamed)):
            self._bind_parameters(index, dtype)

    def wrap(self, layers: Sequence[nn.Module]) -> None:
        """Load weights before each layer's current `forward`; checkpointing must be applied around the result."""
        for index, layer in enumerate(layers):
            layer.forward = partial(self._run, index, layer.forward)

    def _memory(self, size: int, component: Any, detail: str) -> Tensor:
        return claimed(torch.empty(size, dtype=torch.uint8, device=self.link.device), component, detail)

    def _bind_parameters(self, index: int, dtype: torch.dtype) -> None:
        """Make a layer's parameters views of its buffer."""
        offset, memory = 0, self.buffers[index % WEIGHT_SLOTS].memory
        for each in self.streamed[index]:
            size, own = self._elements(each) * dtype.itemsize, each.matrix.rows * each.matrix.width
            part = memory[offset : offset + size].view(dtype)
            self._bind(each, part)
            each.target = part[:own].view(each.matrix.rows, each.matrix.width)
            offset += _aligned(size)

    def _elements(self, each: StreamedParameter) -> int:
        """Elements that the parameter takes in a buffer."""
        return each.parameter.numel()

    def _bind(self, each: StreamedParameter, part: Tensor) -> None:
        each.parameter.data = part.view(each.parameter.shape)

    def _free(self, buffer: LayerBuffer) -> StreamEvent:
        """An event after which nothing reads the buffer any more."""
        return record_current_stream(self.link.device)

    def _run(self, index: int, forward: Any, *arguments: Any, **options: Any) -> Any:
        self._load(index)
        current_stream_waits_for(self.buffers[index % WEIGHT_SLOTS].loaded)
        self._load_following(index)
        return forward(*arguments, **options)

    def _load_following(self, index: int) -> None:
        """Start copying the weights of the layer that runs after layer `index`."""
        following = index - 1 if _in_backward() else index + 1
        if 0 <= following < len(self.streamed):
            self._load(following)

    def _load(self, index: int) -> None:
        """Queue the copy of a layer's newest weights to its buffer, once it is free; nothing if they are there."""
        for each in self.streamed[index]:
            self.link.prioritise(each.matrix)
        buffer, update_counts = (
            self.buffers[index % WEIGHT_SLOTS],
            tuple(e.matrix.update_count for e in self.streamed[index]),
        )
        if (buffer.layer, buffer.update_counts) == (index, update_counts):
            return
        buffer.layer, buffer.update_counts = index, update_counts
        writer = self.caster if self.arrived else self.loader
        writer.wait_for(self._free(buffer))
        for each in self.streamed[index]:
            self.link.wait_for_host(each.matrix)
            self.loader.wait_for(each.matrix.states_ready)
            self._copy(each)
        buffer.loaded = writer.record_event()

    @torch.no_grad()
    def _copy(self, each: StreamedParameter) -> None:
        source, matrix, target = each.matrix.tensors[WEIGHT], each.matrix, each.target
        assert target is not None
        if source.dtype == target.dtype:
            with self.loader:
                target.copy_(source, non_blocking=True)
            return
        for begin in range(0, matrix.rows, matrix.rows_per_piece):
            rows = slice(begin, begin + matrix.rows_per_piece)
            self._cast_piece(source[rows], target[rows])

    def _cast_piece(self, piece: Tensor, target: Tensor) -> None:
        arrived = self.arrived[self.pieces_cast % MASTER_SLOTS]
        self.pieces_cast += 1
        masters = arrived.memory[: piece.nbytes].view(piece.dtype).view(piece.shape)
        self.loader.wait_for(arrived.free)
        with self.loader:
            masters.copy_(piece, non_blocking=True)
        self.caster.wait_for(self.loader.record_event())
        with self.caster:
            target.copy_(masters)
        arrived.free = self.caster.record_event()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
