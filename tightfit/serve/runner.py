"""Runs the decoder on a step, with attention over the paged cache.

Models of the common kind run over joint weights (program.py), others through their layers in models/decoder.py as they
are.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from tightfit.kernels.attention_mask import AttentionMask
from tightfit.kernels.cross_entropy import softcapped
from tightfit.models.decoder import Decoder, ForwardContext
from tightfit.serve.adapters import AdapterSet
from tightfit.serve.cpu_products import fastest_products
from tightfit.serve.joint_weights import can_join
from tightfit.serve.paged_cache import PagedCache
from tightfit.serve.program import Program
from tightfit.serve.rope_tables import RopeTables
from tightfit.serve.step import Step


class Runner:
    """A decoder, its cache and its rope tables."""

    def __init__(
        self,
        model: Decoder,
        cache: PagedCache,
        length: int,
        sequences: int,
        *,
        overlap: bool = True,
        adapters: AdapterSet | None = None,
    ) -> None:
        weight = model.embed.weight
        self.model, self.cache, self.device = model, cache, weight.device
        self.ropes = RopeTables(model.spec, length, weight.device, weight.dtype)
        matrices = [weight for weight in model.layers[0].parameters() if weight.ndim == 2]
        self.fast_products = fastest_products(max(matrices, key=Tensor.numel)) if matrices else nullcontext
        self.adapters = adapters
        self.program = None
        if can_join(model):
            self.program = Program(model, cache, self.ropes, overlap=overlap, sequences=sequences)

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        """Logits [R, V] of the step's rows; keys and values of all its tokens are stored."""
        return self.project(self.states(step))

    @torch.inference_mode()
    def states(self, step: Step) -> Tensor:
        """The residual stream after the last layer at the step's rows, [R, H]."""
        with self.fast_products():
            if self.adapters is not None and step.adapters:
                with self.adapters.applied(step.adapters):
                    return self._through_layers(step)
            return self.program.states(step) if self.program is not None else self._through_layers(step)

    @torch.inference_mode()
    def project(self, states: Tensor) -> Tensor:
        """Logits [R, V] of states [R, H]."""
        with self.fast_products():
            if self.program is not None:
                return self.program.project(states)
            return softcapped(self.model.head(self.model.norm(states)), self.model.spec.logit_softcap)

    def _through_layers(self, step: Step) -> Tensor:
        self.cache.step = step
        x = self.model.embed_tokens(step.tokens, step.positions)
        count = step.tokens.shape[1]
        ctx = ForwardContext(AttentionMask(count, count, self.device), self.ropes.of(step), None, self.cache.attend)
        for layer in self.model.layers:
            x, _ = layer(x, ctx)
        return x[0] if step.rows.numel() == count else x[0, step.rows]
