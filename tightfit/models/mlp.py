"""The MLP of a layer: dense (gated or plain) or a mixture of experts (MoE).

Routing: softmax over all experts in float32, top k, weights renormalised where the family does so.
The load-balancing loss is the Switch Transformer's (Fedus et al. 2021, eq. 4), per layer: E · Σ_e f_e · P_e, where f_e
is the share of tokens routed to expert e (summing to k) and P_e its mean router probability; it is k when balanced.
Hugging Face averages f and P over all layers first, where one layer's imbalance can hide another's.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.kernels.gated_mlp import can_fuse, gated_mlp
from tightfit.kernels.glu import ACTIVATIONS, glu, relu2
from tightfit.kernels.routed_mlp import route, routed_mlp
from tightfit.kernels.triton_support import Impl, use_triton
from tightfit.models.spec import ModelSpec


class Mlp(nn.Module):
    """down(act(gate(x)) · up(x)), or down(act(up(x))) where the family has no gate."""

    def __init__(self, spec: ModelSpec, width: int, impl: Impl = "auto") -> None:
        super().__init__()
        self.activation, self.impl = spec.activation, impl
        self.gate = nn.Linear(spec.hidden_size, width, bias=spec.mlp_bias) if spec.gated else None
        self.up = nn.Linear(spec.hidden_size, width, bias=spec.mlp_bias)
        self.down = nn.Linear(width, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        if self.gate is None:
            return self.down(self._activation(self.up(x))), None
        if use_triton(self.impl, x) and can_fuse(x, self.gate, self.up, self.down):
            weights = self.gate.weight, self.up.weight, self.down.weight
            return gated_mlp(x, *weights, self.activation, impl=self.impl), None
        # `overwrite`: the outputs of gate and up are used here only, so backward may write gradients over them.
        return self.down(glu(self.gate(x), self.up(x), self.activation, overwrite=True, impl=self.impl)), None

    def _activation(self, x: Tensor) -> Tensor:
        return relu2(x, impl=self.impl) if self.activation == "relu2" else ACTIVATIONS[self.activation](x)


class ExpertWeights(nn.Module):
    """The stacked weights of a layer's experts: gate and up [E, F, H], down [E, H, F]."""

    def __init__(self, count: int, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(count, width, hidden_size))
        self.up = nn.Parameter(torch.empty(count, width, hidden_size))
        self.down = nn.Parameter(torch.empty(count, hidden_size, width))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)


def _dense(stack: Tensor | Iterable[Tensor]) -> Tensor:
    """All experts' matrices in one tensor; quantized ones are expanded for the length of a layer."""
    return stack if isinstance(stack, Tensor) else torch.stack(tuple(stack))


class RoutedMlp(nn.Module):
    """A mixture of experts: every token through its top-k experts, and the shared expert where the family has one."""

    def __init__(self, spec: ModelSpec, impl: Impl = "auto") -> None:
        super().__init__()
        assert spec.experts is not None
        assert spec.gated
        assert not spec.mlp_bias
        self.experts_spec, self.activation, self.impl = spec.experts, spec.activation, impl
        self.router = nn.Linear(spec.hidden_size, spec.experts.count, bias=False)
        self.experts = ExpertWeights(spec.experts.count, spec.hidden_size, spec.experts.mlp_size)
        self.shared = Mlp(spec, spec.experts.shared_size, impl) if spec.experts.shared_size else None
        self.shared_gate = nn.Linear(spec.hidden_size, 1, bias=False) if spec.experts.shared_size else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)  # [N, H]
        probabilities = F.softmax(self.router(tokens), dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.experts_spec.per_token, dim=-1)
        if self.experts_spec.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        routing = route(chosen, self.experts_spec.count)
        gate, up, down = (_dense(stack) for stack in (self.experts.gate, self.experts.up, self.experts.down))
        out = routed_mlp(tokens, weights.to(x.dtype), routing, gate, up, down, self.activation, impl=self.impl)
        if self.shared is not None and self.shared_gate is not None:
            out = out + torch.sigmoid(self.shared_gate(tokens)) * self.shared(tokens)[0]
        return out.view_as(x), self._balance_loss(probabilities, routing.offsets)

    def _balance_loss(self, probabilities: Tensor, offsets: Tensor) -> Tensor:
        """E · Σ_e f_e · P_e; offsets[e] is the number of rows routed to the experts up to e."""
        load = offsets.diff(prepend=offsets.new_zeros(1))
        share = load.to(probabilities.dtype) / len(probabilities)
        return len(load) * (share * probabilities.mean(0)).sum()
