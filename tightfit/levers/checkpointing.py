"""Activation checkpointing: save a layer's input (and selected results), recompute the rest in backward.

Chen et al. 2016; selective: Korthikanti et al. 2022. Applied from outside by replacing each layer's `forward`; names
and weights stay as they are. levers/policy decides which layers keep how much, from the levers and the shapes of the
forward pass (memory/formulas/keeping.py); checkpoint_keep.py saves selected results; checkpoint_store.py keeps inputs
on the GPU or the host. Torch's non-reentrant checkpoint does the rest: it restores the random state, stops recomputing
as soon as everything saved is there, and uses the weights that FSDP2 has all-gathered for backward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.checkpointing import is_checkpointed
from tightfit.levers.adapter import ADAPTED
from tightfit.levers.checkpoint_keep import SelectiveCheckpoint
from tightfit.levers.checkpoint_store import HostStore, KeptInput
from tightfit.levers.policy.recompute import KeepLevel, needs_last_product
from tightfit.memory.formulas.keeping import layer_levels
from tightfit.memory.formulas.local_shape import shape_of_tokens
from tightfit.models.decoder import Decoder, Layer

ALONE = Layout()
Forward = Callable[..., tuple[Tensor, Tensor | None]]


def checkpoint_layers(model: Decoder, levers: Levers, layout: Layout = ALONE) -> None:
    """Checkpoint the layers of `model` as `levers` say, on a rank of `layout`."""
    if not is_checkpointed(levers):
        return
    checkpointing = Checkpointing(model, levers, layout)
    for index, layer in enumerate(model.layers):
        layer.forward = partial(checkpointing.run, index, layer.forward)


@dataclass(frozen=True)
class KeptLevels:
    """For each layer of this rank: the level it saves, the number of recomputed layers before it, and whether any of
    them is in the same span of consecutive layers (a stage of a pipeline)."""

    levels: tuple[KeepLevel, ...]
    before: tuple[int, ...]
    follows: tuple[bool, ...]

    @property
    def count(self) -> int:
        """Number of recomputed layers."""
        return self.before[-1] + (self.levels[-1] != "everything")


def rows_and_length(layout: Layout, rows: int, length: int) -> tuple[int, int]:
    """Rows, and tokens of each, whose attention is computed in layers that get [rows, length, hidden]; of sequence
    parallelism that is [1, tokens / tensor ranks, hidden] whatever the rows (parallel/tensor.py)."""
    if layout.tensor == 1 or layout.tensor_mesh != "1d" or not layout.sequence_parallel:
        return rows, length
    tokens = rows * length * layout.tensor
    micro_batch = gcd(tokens, layout.micro_batch)
    return micro_batch, tokens // micro_batch


class Checkpointing:
    """Runs the layers of one model, each saving what its level says."""

    def __init__(self, model: Decoder, levers: Levers, layout: Layout) -> None:
        self.spec, self.levers, self.layout = model.spec, levers, layout
        self.adapted = vars(model).get(ADAPTED)
        self.layer_numbers = tuple(cast(Layer, layer).attention.layer for layer in model.layers)
        self.span_starts = _span_starts(self.layer_numbers)
        self.store: HostStore | None = None
        if levers.offload_checkpoints:
            self.store = HostStore(levers.checkpoint_host_bytes, levers.checkpoint_format)
        self.kept_levels = lru_cache(maxsize=64)(self._kept_levels)

    def _kept_levels(self, rows: int, length: int, element_bytes: int) -> KeptLevels:
        sizes = *rows_and_length(self.layout, rows, length), element_bytes
        shape = shape_of_tokens(self.spec, self.layout, self.levers, *sizes, self.adapted)
        levels = layer_levels(shape, self.levers, self.layer_numbers)
        recomputed = [level != "everything" for level in levels]
        before = tuple(sum(recomputed[:index]) for index in range(len(levels)))
        return KeptLevels(levels, before, tuple(before[i] > before[self.span_starts[i]] for i in range(len(levels))))

    def run(self, index: int, forward: Forward, x: Tensor, *ctx: Any) -> tuple[Tensor, Tensor | None]:
        """Run layer `index`, whose own forward is `forward`, checkpointed at its level."""
        if not torch.is_grad_enabled():  # an evaluation's rows keep nothing, so that no budget is too small for them
            return forward(x, *ctx)
        kept = self.kept_levels(*x.shape[:2], x.element_size())
        level = kept.levels[index]
        if level == "everything":
            return forward(x, *ctx)
        kept_input = KeptInput(x)
        if self.store is not None:
            kept_input = self.store.keep(x, kept.before[index], kept.count, follows=kept.follows[index])
        first_pass = [x]

        def compute(_: Tensor) -> tuple[Tensor, Tensor | None]:
            return forward(first_pass.pop() if first_pass else kept_input.fetch(), *ctx)

        # An MoE layer's last product is not its output, and Gemma norms it: backward of both needs its result.
        skips_last = not needs_last_product(self.spec, self.layer_numbers[index])
        selective = SelectiveCheckpoint(level, skips_last=skips_last)
        # Torch would keep an argument alive, so the input is none; the empty tensor names the device whose RNG to save.
        # Captured steps draw no random numbers, and the RNG state cannot be read during a capture.
        draws = not (x.is_cuda and torch.cuda.is_current_stream_capturing())
        output = checkpoint(
            compute, x.new_empty(0), use_reentrant=False, context_fn=selective.contexts, preserve_rng_state=draws
        )
        assert isinstance(output, tuple)
        return output


def _span_starts(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """For each layer of a rank, the index of the first layer of its span of consecutive layers."""
    starts: list[int] = []
    for index, number in enumerate(numbers):
        begins = index == 0 or number != numbers[index - 1] + 1
        starts.append(index if begins else starts[-1])
    return tuple(starts)
