"""Runs the decoder on a step, with attention over the paged cache.

Models of the common kind run over joint weights (program.py), others through their layers in models/decoder.py as they
are.
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tightfit.kernels.attention.attention_mask import AttentionMask
from tightfit.kernels.loss.cross_entropy import softcapped
from tightfit.memory.formulas.serving import CacheFormat
from tightfit.models.decoder import Decoder, ForwardContext
from tightfit.models.layers.latent_attention import Expansion
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.spec import ModelSpec
from tightfit.serve.cache.latent import LatentCache
from tightfit.serve.cache.paged import PagedCache
from tightfit.serve.forward.adapters import AdapterSet
from tightfit.serve.forward.cpu_products import fastest_products
from tightfit.serve.forward.program import Program
from tightfit.serve.forward.rope_tables import RopeTables
from tightfit.serve.forward.row_tiles import Passes, RowTiles
from tightfit.serve.schedule.step import Step
from tightfit.serve.weights.joint import can_join


def make_cache(
    spec: ModelSpec,
    blocks: int,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    form: CacheFormat = "model",
    pages: int | None = None,
) -> PagedCache:
    """The cache of a model of `spec`."""
    kind = PagedCache if spec.latent is None else LatentCache
    return kind(spec, blocks, block_size, device, dtype, form, pages=pages)


def run_layers(
    layers: Iterable[nn.Module],
    x: Tensor,
    step: Step,
    cache: PagedCache,
    ropes: RopeTables,
    cache_layers: Mapping[int, int],
) -> Tensor:
    """The residual stream x [1, N, H] of a step through `layers`, whose keys and values are in `cache`.

    Layer i uses layer cache_layers[i] of the cache.
    """
    cache.step = step

    def attend(layer: int, *given: Any, **settings: Any) -> Tensor:
        return cache.attend(cache_layers[layer], *given, **settings)

    def attend_latent(layer: int, query: Tensor, vectors: Tensor, expansion: Expansion, *, scale: float) -> Tensor:
        assert isinstance(cache, LatentCache)
        return cache.attend_latent(cache_layers[layer], query, vectors, expansion, scale=scale)

    latent = attend_latent if isinstance(cache, LatentCache) else None
    mask = AttentionMask(x.shape[1], x.shape[1], x.device)
    ctx = ForwardContext(mask, ropes.of(step), None, attend, attend_latent=latent)
    for layer in layers:
        x, _ = layer(x, ctx)
    return x


class Runner:
    """A decoder, its cache and its rope tables."""

    def __init__(
        self,
        model: Decoder,
        cache: PagedCache,
        max_length: int,
        sequences: int,
        *,
        overlap: bool = True,
        adapters: AdapterSet | None = None,
        half: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        weight = model.embed.weight
        self.model, self.cache, self.device = model, cache, weight.device
        self.max_length, self.sequences = max_length, sequences
        self.ropes = RopeTables(model.spec, max_length, weight.device, weight.dtype)
        matrices = [weight for weight in model.layers[0].parameters() if weight.ndim == 2]
        timed = matrices and not batch_invariant  # a choice by timing may differ at the next start
        self.fast_products = fastest_products(max(matrices, key=Tensor.numel)) if timed else nullcontext
        self.adapters = adapters
        self._cache_layers = {layer: layer for layer in range(model.spec.layers)}
        self.program = None
        if can_join(model):
            given = None if adapters is None else adapters.adapters
            self.program = Program(
                model, cache, self.ropes, overlap=overlap, sequences=sequences, half=half, adapters=given
            )
        self.tiles = self._make_tiles() if batch_invariant else None

    def shortened(self) -> "Runner":
        """A copy whose program has only a few layers, which launch every kernel of it."""
        short = copy(self)
        short.program = None if self.program is None else self.program.shortened()
        return short

    def with_layers(self, kept: list[int], cache: PagedCache) -> "Runner":
        """A copy that runs the layers `kept` alone, over a cache that has only those."""
        some = copy(self)
        some.cache, some.tiles = cache, None
        some._cache_layers = {layer: index for index, layer in enumerate(kept)}
        some.program = None if self.program is None else self.program.with_layers(kept, cache)
        return some

    @property
    def adapter_numbers(self) -> dict[str, int]:
        """The adapters that captured steps know, by name."""
        return {} if self.program is None else self.program.choice.numbers

    def set_pages(self, of_block: np.ndarray) -> None:
        """Let the steps launched from now on find the pages that blocks have been given."""
        self.cache.set_pages(of_block)

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        """Logits [R, V] of the step's rows; keys and values of all its tokens are stored."""
        return self.project(self.states(step))

    @torch.inference_mode()
    def states(self, step: Step) -> Tensor:
        """The residual stream after the last layer at the step's rows, [R, H]."""
        with self.fast_products():
            if self.adapters is not None and step.adapters and self.program is None:
                with self.adapters.applied(step.adapters):
                    return self._through_layers(step)
            return self._states(step) if self.tiles is None else self.tiles.states(step)

    @torch.inference_mode()
    def project(self, states: Tensor) -> Tensor:
        """Logits [R, V] of states [R, H]."""
        with self.fast_products():
            return self._project(states) if self.tiles is None else self.tiles.project(states)

    def _states(self, step: Step) -> Tensor:
        return self.program.states(step) if self.program is not None else self._through_layers(step)

    def _project(self, states: Tensor) -> Tensor:
        if self.program is not None:
            return self.program.project(states)
        return softcapped(self.model.head(self.model.norm(states)), self.model.spec.logit_softcap)

    @torch.inference_mode()
    def _make_tiles(self) -> RowTiles:
        """Passes of fixed sizes, tested now for equal bits."""
        return RowTiles(
            self.model.spec,
            Passes(self._states, self._project),
            device=self.device,
            rounded=self.cache.dtype != torch.float32,
            kept_rounded=self.cache.stored_dtype != torch.float32,
            positions=self.max_length,
            block_size=self.cache.block_size,
            padding_block=self.cache.padding_block,
            rows_mix=any(isinstance(part, QuantizedLinear) and part.rows_mix for part in self.model.modules()),
        )

    def _through_layers(self, step: Step) -> Tensor:
        x = self.model.embed_tokens(step.tokens, step.positions)
        layers = (self.model.layers[index] for index in self._cache_layers)
        x = run_layers(layers, x, step, self.cache, self.ropes, self._cache_layers)
        return x[0] if step.rows.numel() == x.shape[1] else x[0, step.rows]
