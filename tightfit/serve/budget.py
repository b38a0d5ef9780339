"""How many blocks the cache gets: decided before anything runs, from what is free once the weights are there.

    blocks = (free bytes · share − activations and logits of the largest step) / bytes of one block in all layers

On a GPU what is free is what the driver says; elsewhere it is the host's available memory (inside a container, at most
what is left of its limit), of which a server takes a quarter at most. More blocks than all sequences at full length
could use are never taken.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tightfit.errors import UserError
from tightfit.hardware.host import free_host_bytes
from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.memory.formulas.layer import layer_cost
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.serving import cache_bytes_per_token, layer_token_bytes, pages_for, split_window
from tightfit.models.decoder import Decoder
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.spec import ModelSpec
from tightfit.plan.serving.cpu_weights import HOST_SHARE
from tightfit.serve.config import EngineConfig
from tightfit.serve.forward.row_tiles import SIZES
from tightfit.serve.schedule.window_pages import least_pages
from tightfit.serve.weights.joint import half_bytes

UNKNOWN_FREE_BYTES = 2**31
"""Taken to be free on systems that do not say."""
LEAST_GRAPH_BYTES = 512 * 2**20
GRAPH_SHARE = 1 / 64
"""Share of a GPU's free memory kept for captured graphs, their buffers and libraries: 1.3 to 3.5 GiB of an H200."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The number of cache blocks, the longest request, and the bytes they were computed from."""

    blocks: int
    max_length: int
    weight_bytes: int
    step_bytes: int
    cache_bytes: int
    free_bytes: int
    half_bytes: int = 0
    """The part of `weight_bytes` that a 16-bit copy of float32 weights takes."""
    draft_bytes: int = 0
    """Weights of a draft model; not in `weight_bytes`."""
    pages: int = 0
    """Pages of layers with a window; 0 where all layers keep all positions in blocks (schedule/window_pages.py)."""
    embedding_bytes: int = 0
    """The part of `weight_bytes` in an untied embedding, of which a step reads only the rows of its tokens."""

    @property
    def standing_bytes(self) -> int:
        """Bytes held between steps: weights, a draft model's too, and cache."""
        return self.weight_bytes + self.draft_bytes + self.cache_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a step reads: where there is a 16-bit copy, the copy and not its original, twice as
        large."""
        return self.weight_bytes - self.embedding_bytes - 2 * self.half_bytes

    def describe(self, block_size: int) -> str:
        """One line for the user."""
        weights, step, cache, free = (
            f"{value / 2**20:,.0f} MiB"
            for value in (self.weight_bytes, self.step_bytes, self.cache_bytes, self.free_bytes)
        )
        pages = f" and {self.pages} for layers with a window" if self.pages else ""
        return (
            f"weights {weights}; cache {cache} = {self.blocks} blocks of {block_size} tokens{pages}; "
            f"largest step {step}; {free} were free; requests up to {self.max_length} tokens"
        )


def decide_budget(
    model: Decoder,
    config: EngineConfig,
    draft: Decoder | None = None,
    *,
    adapter_bytes: int = 0,
    spec: ModelSpec | None = None,
    draft_spec: ModelSpec | None = None,
    agree: Callable[[int, int], tuple[int, ...]] | None = None,
) -> Budget:
    """The budget of an engine of `config` for a model whose weights (and adapters) are on their device already.

    `spec` has this rank's layers and key/value heads where several ranks share the model; `draft_spec` has the layers
    whose keys and values are cached a second time for speculation by skipping layers. `agree` gives, for the blocks and
    pages that this rank has room for, those that all ranks have room for.
    """
    spec, weight = spec or model.spec, next(model.parameters())
    longest = min(config.max_length or spec.max_positions, spec.max_positions)
    window = split_window(model.spec, longest)
    layer_bytes = config.block_size * layer_token_bytes(spec, weight.element_size(), config.cache_format)
    per_page = 0 if window is None else layer_bytes * len(spec.window_layers)
    per_block = layer_bytes * spec.layers - per_page
    if draft is not None:
        per_block += config.block_size * cache_bytes_per_token(draft.spec, draft.embed.weight.element_size())
    if draft_spec is not None:
        per_block += config.block_size * cache_bytes_per_token(draft_spec, weight.element_size())
    step_bytes = step_activation_bytes(spec, config, weight.element_size(), weight.device)
    if isinstance(model.head, QuantizedLinear):
        rows = max(_rows(config), _padded_rows(config, weight.device))
        step_bytes += model.head.expanding_bytes(rows, weight.dtype)
    free = free_bytes(weight.device)
    copy_bytes = _half_copy_bytes(model, config, free)
    room = _room(config, weight.device, free - copy_bytes, step_bytes)
    blocks, pages = _places(room, config, window, longest, per_block, per_page)
    if agree is not None:
        blocks, pages = agree(blocks, pages)
    if blocks < 1:
        block_mib = (per_block + per_page) / 2**20
        raise UserError(
            f"{max(room, 0) / 2**20:,.0f} MiB are left for the cache and a block takes {block_mib:,.2f} MiB; "
            f"free memory, or lower max_sequences ({config.max_sequences:,}) or step_tokens ({config.step_tokens:,})"
        )
    return Budget(
        blocks=blocks,
        max_length=min(longest, blocks * config.block_size),
        weight_bytes=adapter_bytes + _weight_bytes(model) + copy_bytes,
        step_bytes=step_bytes,
        cache_bytes=blocks * per_block + pages * per_page,
        free_bytes=free,
        pages=pages,
        half_bytes=copy_bytes,
        draft_bytes=0 if draft is None or draft is model else _weight_bytes(draft),
        embedding_bytes=0 if model.spec.tied or model.embed is None else model.embed.weight.nbytes,
    )


def _places(
    room: int, config: EngineConfig, window: int | None, longest: int, per_block: int, per_page: int
) -> tuple[int, int]:
    """Blocks that there is room for and use of, and pages of layers with a window, 0 without any."""
    useful = config.max_sequences * -(-longest // config.block_size)
    if window is None or not per_page:  # other stages may have such layers: they find as many pages here as they like
        blocks = min(room // per_block, useful)
        return blocks, 0 if window is None else blocks
    most = pages_for(window, config.max_sequences, config.step_tokens, config.block_size)
    fewest = least_pages(window, config.step_tokens, config.block_size)
    return _blocks_and_pages(room, per_block, per_page, useful=useful, most_pages=most, fewest=fewest)


def _blocks_and_pages(
    room: int, per_block: int, per_page: int, *, useful: int, most_pages: int, fewest: int
) -> tuple[int, int]:
    """Blocks, and pages of layers with a window, `useful` and `most_pages` of them at most.

    Where not all fit, either kind gets half of the room: whatever the lengths of requests, no other division has room
    for more than twice as many. A page for every block where `fewest` would not fit, or where that takes no more.
    """
    pages = min(most_pages, max(room // 2, room - useful * per_block) // per_page)
    blocks = min((room - pages * per_page) // per_block, useful) if per_block else useful
    if fewest <= pages < blocks:
        return blocks, pages
    together = min(room // (per_block + per_page), useful)
    return together, together


def _weight_bytes(model: Decoder) -> int:
    """Bytes of parameters and of buffers, which packed weights are."""
    return sum(each.nbytes for each in (*model.parameters(), *model.buffers()))


def _half_copy_bytes(model: Decoder, config: EngineConfig, free: int) -> int:
    """Bytes of a 16-bit copy of the weights; 0 where it is of no use or takes more than HOST_SHARE of free memory."""
    copy_bytes = half_bytes(model, rounded=config.rounds_weights) if config.half_weights else 0
    return copy_bytes if copy_bytes <= free * HOST_SHARE else 0


def step_activation_bytes(spec: ModelSpec, config: EngineConfig, element_bytes: int, device: torch.device) -> int:
    """Activation bytes of the largest step: one layer's working set over its tokens and the float32 logits of all
    sequences; with `batch_invariant` also the logits of one padded pass."""
    padded = _padded_rows(config, device)
    tokens = max(config.step_tokens, padded)
    working = layer_cost(LocalShape(spec, 1, tokens, element_bytes), spec.layers - 1).forward_working
    return working + FLOAT32_BYTES * (3 * _rows(config) + padded) * spec.vocab_size


def _rows(config: EngineConfig) -> int:
    """The most rows of a step whose logits are computed."""
    return config.max_sequences * (1 + (config.speculated_tokens if config.speculation != "none" else 0))


def _padded_rows(config: EngineConfig, device: torch.device) -> int:
    """Rows of the largest pass of batch-invariant steps, however few of them are wanted; 0 for other steps."""
    return max(SIZES[device.type]) if config.batch_invariant else 0


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`: on a GPU also those that torch has reserved and not allocated."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    free = free_host_bytes()
    return UNKNOWN_FREE_BYTES if free is None else free


def graph_bytes(free: int) -> int:
    """Bytes kept for graphs, their buffers and libraries on a GPU with `free` bytes."""
    return max(LEAST_GRAPH_BYTES, int(GRAPH_SHARE * free))


def _room(config: EngineConfig, device: torch.device, free: int, step_bytes: int) -> int:
    if config.cache_bytes is not None:
        return config.cache_bytes
    if device.type == "cuda":
        return int(free * config.memory_share) - step_bytes - graph_bytes(free)
    return int(free * config.memory_share * HOST_SHARE) - step_bytes
