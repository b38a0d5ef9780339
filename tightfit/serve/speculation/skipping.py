"""A model that is its own draft: it guesses with some of its layers skipped (Zhang et al. 2023, Draft & Verify).

No second model and no second set of weights; the layers that guess have keys and values of their own, as their inputs
differ. How often guesses are kept depends on the model and on which layers are skipped: here inner ones, evenly spread,
as first and last layers matter most. Which tokens come out does not depend on it.
"""

import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.serve.cache.paged import PagedCache
from tightfit.serve.forward.runner import Runner, run_layers
from tightfit.serve.schedule.step import Step


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


class SkippingRunner:
    """Runs some layers of a runner's model on steps, over a cache that has only those."""

    def __init__(self, target: Runner, kept: list[int], cache: PagedCache) -> None:
        self.target, self.cache, self.device = target, cache, target.device
        self._cache_layers = {layer: index for index, layer in enumerate(kept)}

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        """Logits [R, V] of the step's rows; keys and values of all its tokens are stored."""
        model = self.target.model
        layers = (model.layers[index] for index in self._cache_layers)
        with self.target.fast_products():
            x = model.embed_tokens(step.tokens, step.positions)
            x = run_layers(layers, x, step, self.cache, self.target.ropes, self._cache_layers)
        return self.target.project(x[0, step.rows])
