"""Runs the decoder on a step, with attention over the paged cache.

Models of the common kind run over joint weights (program.py), others through their layers in models/decoder.py as they
are.
"""

import torch
from torch import Tensor

from tightfit.kernels.cross_entropy import capped
from tightfit.kernels.visibility import Visibility
from tightfit.models.decoder import Decoder, Surroundings
from tightfit.serve.joint_weights import can_join
from tightfit.serve.paged_cache import PagedCache
from tightfit.serve.program import Program
from tightfit.serve.rope_tables import RopeTables
from tightfit.serve.step import Step


class Runner:
    """A decoder, its cache and its rope tables."""

    def __init__(self, model: Decoder, cache: PagedCache, length: int) -> None:
        weight = model.embed.weight
        self.model, self.cache, self.device = model, cache, weight.device
        self.ropes = RopeTables(model.spec, length, weight.device, weight.dtype)
        self.program = Program(model, cache, self.ropes) if can_join(model.spec) else None

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        """Logits [R, V] of the step's rows; keys and values of all its tokens are stored."""
        if self.program is not None:
            return self.program.logits(step)
        x = self.hidden(step)
        rows = x[0] if step.rows.numel() == x.shape[1] else x[0, step.rows]
        return self.project(self.model.norm(rows))

    def hidden(self, step: Step) -> Tensor:
        """The residual stream after the last layer, [1, N, H]."""
        self.cache.step = step
        x = self.model.embedded(step.tokens, step.positions)
        count = step.tokens.shape[1]
        around = Surroundings(Visibility(count, count, self.device), self.ropes.of(step), None, self.cache.attend)
        for layer in self.model.layers:
            x, _ = layer(x, around)
        return x

    def project(self, x: Tensor) -> Tensor:
        """Logits of normed states [R, H]."""
        return capped(self.model.head(x), self.model.spec.logit_softcap)
