"""Shard streaming: this rank's shards of weights live in host memory, and are copied to the GPU to be all-gathered.

FSDP2 gathers a layer's weights from the shards of all ranks (parallel/data.py). Here the shards of a group are views of
one of two buffers, as layers are in weight_streaming.py, and the buffer is filled before FSDP2 reads it:

    host → buffer     shards of layer 3       shards of layer 4 …     waits until layer 2 is gathered from that buffer
    all-gather            layer 2                 layer 3 …           waits for the copy
    compute           layer 1                 layer 2 …

Layers need not be recomputed, as FSDP2 gathers them again for backward (ZeRO-3) or keeps what it gathered (ZeRO-1, 2).
The GPU then holds the shards of two groups instead of all: it saves the 2 bytes / N a weight that ZeRO-3 with states on
the host still keeps. DeepSpeed calls it ZeRO-Infinity (Rajbhandari et al. 2021).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from tightfit.levers.policy.offload import WEIGHT_SLOTS
from tightfit.levers.side_stream import StreamEvent, current_stream_waits_for, record_current_stream
from tightfit.levers.state_link import StateLink
from tightfit.levers.weight_streaming import LayerBuffer, StreamedParameter, WeightStream


class GatheredGroup(Protocol):
    """Parameters that are all-gathered together."""

    def padded_elements(self, parameter: nn.Parameter) -> int:
        """Elements of a shard as all-gathered: padded to the longest shard of all ranks."""

    def bind(self, parameter: nn.Parameter, memory: Tensor) -> None:
        """Make `memory` the input of the parameter's all-gathers from now on."""

    def gather_after(self, event: StreamEvent) -> None:
        """The next all-gather begins after `event`."""

    def around_gather(self, begin: Callable[[], None], done: Callable[[], None]) -> None:
        """Call `begin` before each all-gather, and `done` after the current stream waits for it."""


class ShardStream(WeightStream):
    """Prefetches the shards of the group that is gathered next."""

    def __init__(
        self,
        groups: Sequence[GatheredGroup],
        streamed: Sequence[Sequence[StreamedParameter]],
        dtype: torch.dtype,
        link: StateLink,
    ) -> None:
        """`streamed` has the streamed parameters of each of `groups`; both are in forward order."""
        self.groups = groups
        self.group_of = {id(each.parameter): group for group, own in zip(groups, streamed, strict=True) for each in own}
        super().__init__(streamed, dtype, link)
        for index, group in enumerate(groups):
            group.around_gather(partial(self._begin, index), partial(self._done, index))

    def _elements(self, each: StreamedParameter) -> int:
        return self.group_of[id(each.parameter)].padded_elements(each.parameter)

    def _bind(self, each: StreamedParameter, part: Tensor) -> None:
        self.group_of[id(each.parameter)].bind(each.parameter, part)

    def _begin(self, index: int) -> None:
        self._load(index)
        loaded = self.buffers[index % WEIGHT_SLOTS].loaded
        self.groups[index].gather_after(loaded)
        current_stream_waits_for(loaded)  # a group of one rank is gathered on this stream

    def _done(self, index: int) -> None:
        self.buffers[index % WEIGHT_SLOTS].gathered = record_current_stream(self.link.device)
        self._load_following(index)

    def _free(self, buffer: LayerBuffer) -> StreamEvent:
        return buffer.gathered
