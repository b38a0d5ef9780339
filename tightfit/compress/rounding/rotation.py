"""Hadamard rotation of the residual stream: outliers of single channels are spread over all of them.

RMSNorm without weight commutes with a rotation, so with norms folded into the layers after them

    embed → embed · R,   W_in → W_in · diag(norm) · R,   W_out → Rᵀ · W_out,   head → head · diag(norm) · R

computes the same function with activations and weights that round better (QuaRot, Ashkboos et al. 2024; the parts that
cost nothing at run time). Each head's values are rotated too: v → R_h · v, o → o · R_hᵀ. R is a Hadamard matrix of the
largest power of two in the width, times a random orthogonal matrix of what remains, with random signs.

Files get an output projection of their own where the embedding was tied to it. Norms after attention and MLP (Gemma 2
and 3) and LayerNorm (GPT-2), which takes a mean, do not commute with R. Latent attention (DeepSeek) has other heads.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from tightfit.errors import UserError
from tightfit.models.decoder import Decoder, Layer
from tightfit.models.layers.mlp import ExpertWeights
from tightfit.models.layers.norm import RmsNorm
from tightfit.models.spec import ModelSpec

READERS = ("gate", "up", "router", "shared_gate")
"""Modules of an MLP that read the normed residual stream."""


def rotated_spec(spec: ModelSpec) -> ModelSpec:
    """The shape of the rotated model; refuse models that cannot be rotated."""
    reasons = {
        "LayerNorm, which takes a mean": spec.norm == "layer",
        "norms after its layers": spec.sandwich_norms,
        "latent attention": spec.latent is not None,
    }
    for reason in (reason for reason, is_so in reasons.items() if is_so):
        raise UserError(f"a {spec.family} model has {reason}, and cannot be rotated; leave the rotation out")
    return replace(spec, tied=False)


def rotation(size: int, seed: int = 0) -> Tensor:
    """An orthogonal matrix [size, size], float64: Hadamard as far as `size` allows."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + size)
    power = size & -size
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < power:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    rest = torch.linalg.qr(torch.randn(size // power, size // power, dtype=torch.float64, generator=generator)).Q
    signs = torch.randint(0, 2, (size,), generator=generator, dtype=torch.float64) * 2 - 1
    return signs[:, None] * torch.kron(rest.contiguous(), hadamard / power**0.5)


class Rotation:
    """The matrices of one model, and what they do to its parts."""

    def __init__(self, spec: ModelSpec, seed: int = 0) -> None:
        self.spec = spec
        self.stream, self.head = rotation(spec.hidden_size, seed), rotation(spec.head_dim, seed)

    @torch.no_grad()
    def turn_layer(self, layer: Layer) -> None:
        """Fold the norms of a layer and rotate what reads and writes the residual stream."""
        attention = layer.attention
        for projection in (attention.q, attention.k, attention.v):
            self._turn_inputs(projection.weight, layer.attention_norm)
        self._turn_outputs(attention.o)
        self._turn_heads(attention.v, attention.o)
        for name, module in layer.mlp.named_modules():
            own = name.rpartition(".")[2]
            if isinstance(module, nn.Linear) and own in READERS:
                self._turn_inputs(module.weight, layer.mlp_norm)
            elif isinstance(module, nn.Linear) and own == "down":
                self._turn_outputs(module)
            elif isinstance(module, ExpertWeights):
                self._turn_inputs(module.gate, layer.mlp_norm)
                self._turn_inputs(module.up, layer.mlp_norm)
                module.down.copy_(self._moved(self.stream, module.down).T @ module.down.double())
        for norm in (layer.attention_norm, layer.mlp_norm):
            _reset(norm)

    @torch.no_grad()
    def turn_embedding(self, model: Decoder) -> None:
        """Rotate the embedding of a model whose output projection is its own."""
        model.embed.weight.copy_(model.embed.weight.double() @ self._moved(self.stream, model.embed.weight))

    @torch.no_grad()
    def turn_head(self, model: Decoder) -> None:
        """Fold the final norm into the output projection and rotate that."""
        self._turn_inputs(model.head.weight, model.norm)
        _reset(model.norm)

    def _turn_inputs(self, weight: Tensor, norm: nn.Module) -> None:
        assert isinstance(norm, RmsNorm)
        folded = weight.double() * (norm.weight.double() + norm.offset)
        weight.copy_(folded @ self._moved(self.stream, weight))

    def _turn_outputs(self, linear: nn.Linear) -> None:
        turned = self._moved(self.stream, linear.weight).T
        linear.weight.copy_(turned @ linear.weight.double())
        if linear.bias is not None:
            linear.bias.copy_(turned @ linear.bias.double())

    def _turn_heads(self, v: nn.Linear, o: nn.Linear) -> None:
        turn, size = self._moved(self.head, v.weight), self.spec.head_dim
        v.weight.copy_((turn.T @ v.weight.double().unflatten(0, (-1, size))).flatten(0, 1))
        if v.bias is not None:
            v.bias.copy_((v.bias.double().unflatten(0, (-1, size)) @ turn).flatten())
        o.weight.copy_((o.weight.double().unflatten(1, (-1, size)) @ turn).flatten(1))

    def _moved(self, matrix: Tensor, like: Tensor) -> Tensor:
        return matrix.to(like.device)


def _reset(norm: nn.Module) -> None:
    """Reset the weight of a norm that has been folded into the layers after it."""
    assert isinstance(norm, RmsNorm)
    norm.weight.fill_(1.0 - norm.offset)
