"""A model that is its own draft: it guesses with some of its layers skipped (Zhang et al. 2023, Draft & Verify).

No second model and no second set of weights; the layers that guess have keys and values of their own, as their inputs
differ. How often guesses are kept depends on the model and on which layers are skipped: here inner ones, evenly spread,
as first and last layers matter most. Which tokens come out does not depend on it.
"""

from dataclasses import replace

from tightfit.errors import UserError
from tightfit.models.spec import ModelSpec
from tightfit.serve.budget import Budget
from tightfit.serve.config import EngineConfig
from tightfit.serve.forward.runner import Runner, make_cache


def kept_layers(layers: int, skipped: int) -> list[int]:
    """The layers that guess, where `skipped` of the inner ones are left out at even distances."""
    inner = layers - 2
    if not 1 <= skipped <= inner:
        raise UserError(
            f"skip is {skipped}, but a model of {layers} layers has {max(inner, 0)} between its first and last; "
            "give 1 to that many"
        )
    left_out = {1 + (2 * index + 1) * inner // (2 * skipped) for index in range(skipped)}
    return [layer for layer in range(layers) if layer not in left_out]


def skipping_spec(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """The shape of the cache for the layers that guess, where a model skips some of its own."""
    return replace(spec, layers=len(kept_layers(spec.layers, config.skipped_layers)))


def make_skipping_runner(target: Runner, budget: Budget, config: EngineConfig) -> Runner:
    """The draft that is `target` itself without some of its layers."""
    spec, weight = target.model.spec, target.model.embed.weight
    cache = make_cache(skipping_spec(spec, config), budget.blocks, config.block_size, weight.device, weight.dtype)
    return target.with_layers(kept_layers(spec.layers, config.skipped_layers), cache)
