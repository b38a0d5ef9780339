"""Keeping: the level at which each layer keeps its activations, for formulas, simulations and runs alike.

levers/policy decides, given for each level the bytes a layer keeps (saved.py) and the seconds of recomputing the rest.
Seconds are always those of an H200 at measured shares of its rates, whatever the job's card: only their ratios matter,
and a plan, its simulation and the run must choose alike. Bytes are what layers keep from forward to backward, inputs
included unless those are offloaded (all but one).
"""

from collections.abc import Hashable
from functools import lru_cache

from tightfit.hardware.catalog import CATALOG
from tightfit.hardware.efficiency import MEASURED, by_head_size
from tightfit.jobs.levers import Levers
from tightfit.levers.policy.budget import KeepOption, Options, cheapest_levels
from tightfit.levers.policy.recompute import KEEP_LEVELS, KeepLevel, fixed_levels, needs_last_product
from tightfit.memory.formulas.layer import layer_kept
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.saved import total
from tightfit.models.spec import ModelSpec

H200 = next(row for row in CATALOG if row.family == "H200")
_fixed_levels = lru_cache(maxsize=65536)(fixed_levels)


def layer_levels(shape: LocalShape, levers: Levers, layers: range | tuple[int, ...]) -> tuple[KeepLevel, ...]:
    """The level of each of a rank's `layers`."""
    if levers.checkpoint_budget_bytes is not None:
        return _budget_levels(shape, layers, levers.checkpoint_budget_bytes, levers.offload_checkpoints)
    every, count, keep = levers.checkpoint_every, levers.num_checkpoints, levers.checkpoint_keep
    return _fixed_levels(layers, model_layers=shape.spec.layers, every=every, count=count, keep=keep)


@lru_cache(maxsize=65536)
def _budget_levels(
    shape: LocalShape, layers: range | tuple[int, ...], budget_bytes: int, offload: bool
) -> tuple[KeepLevel, ...]:
    kinds = [shape.spec.traits_of(layer) for layer in layers]
    options: dict[Hashable, Options] = {}
    for layer, kind in zip(layers, kinds, strict=True):
        options.setdefault(kind, level_options(shape, layer, offload))
    one_input_bytes = shape.stream_bytes if offload else 0
    return cheapest_levels(kinds, options, budget_bytes=budget_bytes, always_bytes=one_input_bytes)


@lru_cache(maxsize=4096)
def level_options(shape: LocalShape, layer: int, offload: bool = False) -> tuple[KeepOption, ...]:
    """Bytes kept on the GPU and seconds of recomputation of one layer at each level.

    Tiled layers recompute the MLP's products at every level, so `matmuls` is given the costs of `attention`. Under
    adapters products of frozen matrices cannot be kept: `matmuls` gets costs that make it no better than the others.
    """
    seconds, options = _recompute_seconds(shape, layer), dict[KeepLevel, KeepOption]()
    for level in KEEP_LEVELS:
        on_host_bytes = shape.stream_bytes if offload and level != "everything" else 0
        options[level] = KeepOption(total(layer_kept(shape, layer, level)) - on_host_bytes, seconds[level])
    if shape.adapted is not None:
        options["matmuls"] = KeepOption(options["attention"].bytes, options["nothing"].seconds)
    elif shape.has_tiles:
        options["matmuls"] = options["attention"]
    return tuple(options.values())


def _recompute_seconds(shape: LocalShape, layer: int) -> dict[KeepLevel, float]:
    """Seconds of recomputing one layer at each level."""
    spec = shape.spec
    peak_flop_s = 1e12 * (H200.rates.of("fp32" if shape.element_bytes == 4 else "bf16") or H200.rates.fp32)
    attention_flop_s = peak_flop_s * by_head_size(MEASURED.attention_forward, spec.head_dim)
    # 4 FLOPs per channel and pair of a query and a visible key: a multiply and an add in Q·Kᵀ and in P·V.
    keys_seen = spec.mean_keys_seen(layer, shape.whole_length)
    attention_s = 4 * shape.tokens * keys_seen * spec.query_size / shape.tensor / attention_flop_s
    product_flop_s = peak_flop_s * MEASURED.matmul
    products_s = 2 * shape.tokens * _recomputed_weights(shape, layer) / shape.tensor / product_flop_s
    recomputed_bytes = shape.tokens * shape.element_bytes * _recomputed_width(spec, layer)
    passes_s = recomputed_bytes / shape.tensor / (H200.bandwidth_gb_s * 1e9 * MEASURED.bandwidth)
    return {
        "nothing": attention_s + products_s + passes_s,
        "attention": products_s + passes_s,
        "matmuls": passes_s,
        "everything": 0.0,
    }


def _recomputed_weights(shape: LocalShape, layer: int) -> int:
    """Weights of the products that are recomputed per token: all, or all but the last if nothing needs its result; in
    tiled layers q, k and v, as everything after attention is recomputed at every level."""
    spec = shape.spec
    if shape.is_tiled(layer):
        return spec.hidden_size * (spec.query_size + 2 * spec.kv_size)
    attention = spec.hidden_size * (2 * spec.query_size + 2 * spec.kv_size)
    if spec.latent is not None:
        attention = spec.attention_params()
    mlp_products = spec.up_projections + needs_last_product(spec, layer)
    return attention + mlp_products * spec.hidden_size * spec.active_mlp_size(layer)


def _recomputed_width(spec: ModelSpec, layer: int) -> int:
    """Elements per token that recomputed norms, rope and (where its result is needed) the activation read and write."""
    norms = 3 * spec.norms_per_layer * spec.hidden_size
    rope = 2 * (spec.query_size + spec.kv_size) * (2 if spec.qk_norm else 1)
    needs_product = not spec.gated or spec.mlp_bias or needs_last_product(spec, layer)
    return norms + rope + (3 * spec.active_mlp_size(layer) if needs_product else 0)
