"""ModelSpec: the shapes of a decoder, and nothing else.

One frozen type covers every supported family, dense or mixture of experts. The planner counts with it and the decoder
is built from it, so it imports neither torch nor transformers. Whatever can be derived (parameter counts, which layers
have a sliding window) is a method.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from tightfit.errors import UserError

Norm = Literal["rms", "rms_plus_one", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "swiglu_clamped"]
Score = Literal["softmax", "sigmoid"]
RopeScaling = Literal["none", "linear", "dynamic", "yarn", "llama3", "longrope"]
SIZES = ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "mlp_size", "max_positions")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: base frequency, the rotated share of each head, and a scaling rule with its constants.

    `factors` holds what the rule needs, by the names Hugging Face gives them (`factor`, `beta_fast`, …);
    `short_factor` and `long_factor` (LongRoPE) are one number per rotated pair.
    """

    theta: float = 10_000.0
    rotated_share: float = 1.0
    scaling: RopeScaling = "none"
    factors: tuple[tuple[str, float], ...] = ()
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def factor(self, name: str, default: float | None = None) -> float | None:
        """The constant `name` of the scaling rule."""
        return dict(self.factors).get(name, default)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A routed mixture: `per_token` of `count` experts of width `mlp_size`, and an optional shared one.

    `dense_layers` keep a plain MLP. `balance_weight` multiplies the load-balancing loss in training.
    """

    count: int
    per_token: int
    mlp_size: int
    score: Score = "softmax"
    """How the router's logits become scores, over all experts."""
    normalise: bool = True
    """Whether the weights of a token's experts are made to sum to 1."""
    scale: float = 1.0
    """What the weights of a token's experts are multiplied by."""
    groups: int = 1
    """Number of groups, of equally many consecutive experts."""
    chosen_groups: int = 1
    """Number of groups a token's experts come from: those whose best expert (corrected: best two) score highest."""
    router_bias: bool = False
    """Whether the router has a bias (gpt-oss)."""
    corrected: bool = False
    """Whether experts are chosen by score + a bias per expert, which balances their load without a loss."""
    shared_size: int = 0
    shared_gated: bool = True
    """Whether the shared expert is multiplied by a gate of its own."""
    balance_weight: float = 0.0
    dense_layers: tuple[int, ...] = ()
    z_weight: float = 0.0
    """Multiplies the router's z-loss in training."""
    capacity_factor: float | None = None
    """How many times its even share of tokens an expert takes in training (jobs/experts.py); None: no limit."""

    def capacity(self, tokens: int) -> int | None:
        """Tokens that an expert takes of `tokens`, ⌈factor · k · tokens / count⌉; None where there is no limit."""
        if self.capacity_factor is None:
            return None
        return max(1, math.ceil(self.capacity_factor * self.per_token * tokens / self.count))

    @property
    def computed_per_token(self) -> float:
        """Experts that a token goes through on average, where loads are even."""
        return self.per_token * min(1.0, self.capacity_factor or 1.0)

    def rows(self, tokens: int) -> int:
        """The most (token, expert) pairs that are computed of `tokens`."""
        capacity = self.capacity(tokens)
        pairs = self.per_token * tokens
        return pairs if capacity is None else min(pairs, self.count * capacity)


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values are expanded from one latent vector per token.

    `head_dim` of the model is that of queries and keys, of which the last `rope_dim` are rotated; the rotated part of a
    key is the same for all heads.
    """

    kv_rank: int
    """Width of the latent vector that keys and values are expanded from."""
    rope_dim: int
    value_dim: int
    """Width of a head's values."""
    query_rank: int = 0
    """Width of the latent vector that queries are expanded from; 0 where they come from the hidden state."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The shapes of one decoder-only transformer. `family` is its Hugging Face `model_type`."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    max_positions: int
    tied: bool = False
    norm: Norm = "rms"
    norm_eps: float = 1e-5
    sandwich_norms: bool = False
    """Norms after attention and MLP as well as before (Gemma-2, Gemma-3)."""
    qk_norm: bool = False
    qk_norm_joint: bool = False
    """Whether that norm is over all heads together (OLMoE) and not over each."""
    activation: Activation = "silu"
    gated: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    rope: Rope | None = field(default_factory=Rope)
    """None means learned absolute positions (GPT-2)."""
    local_rope: Rope | None = None
    """The rope of windowed layers where it differs from that of global ones (Gemma-3)."""
    attention_scale: float | None = None
    """Multiplies the scores; None means 1/√head_dim."""
    sinks: bool = False
    """Whether each head has a learned logit that takes part in the softmax and has no value (gpt-oss)."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    window: int | None = None
    window_layers: tuple[int, ...] = ()
    """Layers that see only the last `window` tokens."""
    experts: Experts | None = None
    latent: Latent | None = None

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"model {name} is {value!r}; it must be a whole number of at least 1")
        if self.heads % self.kv_heads:
            raise UserError(
                f"model has {self.heads} attention heads and {self.kv_heads} key/value heads; "
                "the first must be a multiple of the second"
            )
        if self.rope is not None and (self.head_dim * self.rope.rotated_share) % 2:
            raise UserError(f"model rotates {self.rope.rotated_share} of head size {self.head_dim}; that must be even")
        if self.window_layers and (self.window is None or self.window < 1):
            raise UserError(f"model window is {self.window!r}, but layers {self.window_layers} are windowed")
        if self.experts and not 0 < self.experts.per_token <= self.experts.count:
            raise UserError(
                f"model routes to {self.experts.per_token} of {self.experts.count} experts; give 1 to that many"
            )
        self._check_groups()
        if self.latent is not None and not 0 < max(self.latent.rope_dim, self.latent.value_dim) <= self.head_dim:
            raise UserError(
                f"model rotates {self.latent.rope_dim} and has values of {self.latent.value_dim} numbers in heads of "
                f"{self.head_dim}; neither may be larger"
            )

    def _check_groups(self) -> None:
        experts = self.experts
        if experts is None:
            return
        each = experts.count // max(1, experts.groups)
        wrong = experts.groups < 1 or experts.count % experts.groups or not 0 < experts.chosen_groups <= experts.groups
        if wrong or experts.per_token > each * experts.chosen_groups or (experts.corrected and each < 2):
            raise UserError(
                f"model chooses {experts.per_token} of {experts.count} experts from {experts.chosen_groups} of "
                f"{experts.groups} groups, which is not possible"
            )

    def window_of(self, layer: int) -> int | None:
        """The attention window of layer `layer` in tokens, the query included; None means unlimited."""
        return self.window if layer in self.window_layers else None

    def rope_of(self, layer: int) -> Rope | None:
        """The rope of layer `layer`."""
        return self.local_rope if self.local_rope is not None and layer in self.window_layers else self.rope

    def mean_keys_seen(self, layer: int, length: int) -> float:
        """Keys that a query of layer `layer` attends to, on average over a row of `length` tokens."""
        window = min(self.window_of(layer) or length, length)
        return window - window**2 / (2 * length)

    def is_routed(self, layer: int) -> bool:
        """Whether layer `layer` routes to experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def traits_of(self, layer: int) -> tuple[bool, bool]:
        """Whether layer `layer` is routed, and whether it has a window; layers alike in both are equal in size."""
        return self.is_routed(layer), self.window_of(layer) is not None

    def active_mlp_size(self, layer: int) -> int:
        """Width of the MLPs that one token of layer `layer` goes through: the dense one, or its experts together."""
        if self.experts is None or not self.is_routed(layer):
            return self.mlp_size
        return self.experts.per_token * self.experts.mlp_size + self.experts.shared_size

    @property
    def up_projections(self) -> int:
        """Matrices that an MLP multiplies its input by: gate and up, or up alone."""
        return 2 if self.gated else 1

    @property
    def norms_per_layer(self) -> int:
        """Norms over the hidden size in one layer."""
        return 4 if self.sandwich_norms else 2

    @property
    def as_saved(self) -> "ModelSpec":
        """The spec without settings of training alone (jobs/experts.py), which no file of a model has."""
        if self.experts is None:
            return self
        return replace(self, experts=replace(self.experts, z_weight=0.0, capacity_factor=None))

    @property
    def query_size(self) -> int:
        """Width of the queries of one layer."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (and of the values) of one layer."""
        return self.kv_heads * self.head_dim

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that rope may rotate (`rotated_share` of them)."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def output_size(self) -> int:
        """Width of the input of one layer's projection `o`."""
        return self.heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def latent_columns(self) -> int:
        """Width of all heads' keys (without their rotated part) and values in latent attention; 0 in other models."""
        latent = self.latent
        return 0 if latent is None else self.heads * (self.head_dim - latent.rope_dim + latent.value_dim)

    @property
    def qk_norm_params(self) -> int:
        """Parameters of one layer's norms of queries and keys."""
        return (self.query_size + self.kv_size if self.qk_norm_joint else 2 * self.head_dim) * self.qk_norm

    @property
    def norm_params(self) -> int:
        """Parameters of one norm over the hidden size."""
        return self.hidden_size * (2 if self.norm == "layer" else 1)

    def attention_params(self) -> int:
        """Parameters of one layer's attention."""
        h, q, kv = self.hidden_size, self.query_size, self.kv_size
        if self.latent is not None:
            return self._latent_params(self.latent)
        bias = (q + 2 * kv) * self.qkv_bias + h * self.output_bias
        return h * (q + 2 * kv) + q * h + bias + self.qk_norm_params + self.heads * self.sinks

    def _latent_params(self, latent: Latent) -> int:
        h, q, rank = self.hidden_size, self.query_size, latent.query_rank
        queries = h * rank + rank + rank * q if rank else h * q
        shared = h * (latent.kv_rank + latent.rope_dim) + latent.kv_rank
        expanded = latent.kv_rank * self.latent_columns
        bias = (rank + latent.kv_rank + latent.rope_dim) * self.qkv_bias + h * self.output_bias
        return queries + shared + expanded + self.output_size * h + bias

    def mlp_params(self, width: int) -> int:
        """Parameters of one dense MLP of `width`."""
        biases = self.up_projections * width + self.hidden_size
        return (self.up_projections + 1) * self.hidden_size * width + biases * self.mlp_bias

    def layer_params(self, layer: int, *, active: bool = False) -> int:
        """Parameters of layer `layer`; with `active`, those that one token uses."""
        norms = self.norm_params * self.norms_per_layer
        if not self.is_routed(layer):
            return self.attention_params() + norms + self.mlp_params(self.mlp_size)
        experts = self.experts
        assert experts is not None
        routed = self.mlp_params(experts.mlp_size) * (experts.per_token if active else experts.count)
        return self.attention_params() + norms + routed + self.shared_params + self.router_params

    @property
    def shared_params(self) -> int:
        """Parameters of a routed layer's shared expert and its gate."""
        experts = self.experts
        if experts is None or not experts.shared_size:
            return 0
        return self.mlp_params(experts.shared_size) + self.hidden_size * experts.shared_gated

    @property
    def router_params(self) -> int:
        """Parameters of a routed layer's router: its matrix, its bias, and what corrects the choice of experts."""
        experts = self.experts
        return 0 if experts is None else (self.hidden_size + experts.router_bias + experts.corrected) * experts.count

    @property
    def vocabulary_params(self) -> int:
        """Parameters of the token embedding; the output projection has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def embedding_params(self) -> int:
        """Parameters before the first layer."""
        positions = self.max_positions * self.hidden_size if self.rope is None else 0
        return self.vocabulary_params + positions

    @property
    def head_params(self) -> int:
        """Parameters of the output projection that the embedding does not already hold."""
        return 0 if self.tied else self.vocabulary_params

    def params(self, *, active: bool = False) -> int:
        """All parameters; with `active`, those that one token uses."""
        layers = sum(self.layer_params(i, active=active) for i in range(self.layers))
        return self.embedding_params + layers + self.norm_params + self.head_params
