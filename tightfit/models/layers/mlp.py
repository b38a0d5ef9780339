"""The MLP of a layer: dense (gated or plain) or a mixture of experts (MoE).

Which experts a token goes to, and with what weights: routing.py.
The load-balancing loss is the Switch Transformer's (Fedus et al. 2021, eq. 4), per layer: E · Σ_e f_e · P_e, where f_e
is the share of tokens routed to expert e (summing to k) and P_e its mean router probability; it is k when balanced.
Hugging Face averages f and P over all layers first, where one layer's imbalance can hide another's. Beside it stands
the router's z-loss where training asks for one (ST-MoE). With a capacity (Switch; Lepikhin et al. 2020, GShard) an
expert takes only its first tokens while training: first choices before second ones, and in the order of the batch. What
is dropped adds nothing to the residual stream. Loads are those that routers ask for, before anything is dropped.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from tightfit.collectives.conjugate import is_recomputing
from tightfit.kernels.experts.routed_mlp import Routing, route, routed_mlp
from tightfit.kernels.mlp.gated_mlp import can_fuse, gated_mlp
from tightfit.kernels.mlp.glu import ACTIVATIONS, glu, relu2
from tightfit.kernels.triton_support import Impl, use_triton
from tightfit.models.layers.routing import choose, scored, z_loss
from tightfit.models.spec import Experts, ModelSpec

SharedExpert = Callable[[], Tensor] | None
"""Computes the shared expert beside the routed ones; on several ranks, while tokens are exchanged."""


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

    def __init__(self, spec: ModelSpec, experts: Experts, impl: Impl = "auto") -> None:
        super().__init__()
        count, width, hidden_size = experts.count, experts.mlp_size, spec.hidden_size
        self.activation, self.impl = spec.activation, impl
        self.gate = nn.Parameter(torch.empty(count, width, hidden_size))
        self.up = nn.Parameter(torch.empty(count, width, hidden_size))
        self.down = nn.Parameter(torch.empty(count, hidden_size, width))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)
        self.gate_bias: nn.Parameter | None = None
        self.up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        self.adds_down_bias = True
        """Of ranks whose results are summed, one adds `down_bias`; on others its gradient is zero."""
        if spec.mlp_bias:
            self.gate_bias, self.up_bias = (nn.Parameter(torch.zeros(count, width)) for _ in range(2))
            self.down_bias = nn.Parameter(torch.zeros(count, hidden_size))

    def forward(
        self, tokens: Tensor, weights: Tensor, routing: Routing, shared_expert: SharedExpert
    ) -> tuple[Tensor, Tensor | None]:
        """Every token's experts, weighted and summed, and the shared expert's output."""
        return self.compute(tokens, weights, routing), shared_expert() if shared_expert is not None else None

    def compute(self, tokens: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        """Σ_j weights[t, j] · expert_j(tokens[t]) over the experts on this rank."""
        gate, up, down = (_dense(stack) for stack in (self.gate, self.up, self.down))
        biases = None
        if self.gate_bias is not None and self.up_bias is not None and self.down_bias is not None:
            biases = self.gate_bias, self.up_bias, self.down_bias if self.adds_down_bias else 0 * self.down_bias
        return routed_mlp(tokens, weights, routing, gate, up, down, self.activation, biases=biases, impl=self.impl)


def _dense(stack: Tensor | Iterable[Tensor]) -> Tensor:
    """All experts' matrices in one tensor; quantized ones are dequantized while the layer runs."""
    return stack if isinstance(stack, Tensor) else torch.stack(tuple(stack))


class RoutedMlp(nn.Module):
    """A mixture of experts: every token through its top-k experts, and the shared expert where the family has one."""

    def __init__(self, spec: ModelSpec, impl: Impl = "auto") -> None:
        super().__init__()
        assert spec.experts is not None
        assert spec.gated
        self.experts_spec = spec.experts
        self.router = nn.Linear(spec.hidden_size, spec.experts.count, bias=spec.experts.router_bias)
        self.experts = ExpertWeights(spec, spec.experts, impl)
        self.shared = Mlp(spec, spec.experts.shared_size, impl) if spec.experts.shared_size else None
        gated = spec.experts.shared_size and spec.experts.shared_gated
        self.shared_gate = nn.Linear(spec.hidden_size, 1, bias=False) if gated else None
        self.correction: nn.Parameter | None = None
        """Added to the scores of experts where they are chosen; not trained, but moved by the load of each step."""
        if spec.experts.corrected:
            self.correction = nn.Parameter(torch.zeros(spec.experts.count), requires_grad=False)
        self.load: Tensor | None = None
        """Tokens that training has sent to each expert, [E], since it was last set to zero."""
        self.corrected_load: Tensor | None = None
        """`load` as it was when the choice of experts was last corrected (train/expert_load.py)."""
        self.dropped: Tensor | None = None
        """Of `load`, the tokens that experts had no room for."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)  # [N, H]
        logits = self.router(tokens)
        probabilities = scored(logits, self.experts_spec.score)
        weights, chosen = choose(probabilities, self.experts_spec, self.correction)
        capacity = self.experts_spec.capacity(len(tokens)) if torch.is_grad_enabled() else None
        routing = route(chosen, self.experts_spec.count, capacity)
        shared_expert = None if self.shared is None else partial(self._shared, tokens)
        out, shared = self.experts(tokens, weights.to(x.dtype), routing, shared_expert)
        if shared is not None:
            out = out + shared
        self._count(routing.load, capacity)
        return out.view_as(x), self._auxiliary_loss(logits, probabilities, routing.load)

    def _shared(self, tokens: Tensor) -> Tensor:
        assert self.shared is not None
        out: Tensor = self.shared(tokens)[0]
        return out if self.shared_gate is None else torch.sigmoid(self.shared_gate(tokens)) * out

    def _count(self, load: Tensor, capacity: int | None) -> None:
        """Add `load` to what training has sent each expert; not again when the layer is recomputed."""
        if not torch.is_grad_enabled() or is_recomputing():
            return
        self.load = _added(self.load, load)
        if capacity is not None:
            self.dropped = _added(self.dropped, (load - capacity).clamp(min=0))

    def _auxiliary_loss(self, logits: Tensor, probabilities: Tensor, load: Tensor) -> Tensor:
        """What training adds to the loss for this layer: balance and z-loss, with their weights."""
        added = self.experts_spec.balance_weight * self._balance_loss(probabilities, load)
        return added + self.experts_spec.z_weight * self._z_loss(logits) if self.experts_spec.z_weight else added

    def _z_loss(self, logits: Tensor) -> Tensor:
        return z_loss(logits)

    def _balance_loss(self, probabilities: Tensor, load: Tensor) -> Tensor:
        """E · Σ_e f_e · P_e, where load[e] is the number of tokens routed to expert e."""
        share = load.to(probabilities.dtype) / len(probabilities)
        return len(load) * (share * probabilities.mean(0)).sum()


def _added(total: Tensor | None, more: Tensor) -> Tensor:
    """total + more, in place, as a CUDA graph of a step adds to the same memory every time it is replayed."""
    return more.clone() if total is None else total.to(more.device).add_(more)
