"""Structured pruning of one layer: whole heads, MLP channels and experts are removed; an ordinary layer remains.

| part | its worth | measured on |
|---|---|---|
| layer | 1 − cos(x, layer(x)), mean over tokens (Block Influence; Men et al. 2024) | the residual stream |
| key/value head with its queries | tr(O_g H_gg O_gᵀ): squared output it adds | inputs of the output projection |
| MLP channel j | ‖down_j‖² · H_jj | inputs of `down` |
| expert | the sum of its routing weights; every group keeps equally many | the router |

When columns K of a matrix stay, the least squares fit makes up for the others: W' = W H[:, K] (H[K, K] + λI)⁻¹, the
least tr((W − W'S) H (W − W'S)ᵀ) there is, S selecting K. Every layer keeps equally many of each, as configs have
one size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.compress.calibration.inputs import output_error
from tightfit.compress.calibration.observation import layer_of, observe, run_layer, through
from tightfit.compress.linear_sets import EXPERT_STACKS
from tightfit.compress.rounding.moving_scales import linear
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder, Layer
from tightfit.models.layers.mlp import RoutedMlp
from tightfit.models.layers.routing import choose, scored
from tightfit.models.spec import ModelSpec

DAMPING = 1e-4
"""λ, as a share of the mean diagonal of H."""


@dataclass(frozen=True, kw_only=True)
class KeptShape:
    """How many of each part stay; None for all."""

    layers: int | None = None
    heads: int | None = None
    mlp: int | None = None
    experts: int | None = None

    def check(self, spec: ModelSpec) -> None:
        """Refuse what the model does not have."""
        if self == KeptShape():
            raise UserError("nothing is to be cut; say what stays with --keep-layers, -heads, -mlp or -experts")
        ratio = spec.heads // spec.kv_heads
        if self.heads is not None:
            _check_heads(self.heads, spec)
        if self.mlp is not None and all(spec.is_routed(i) for i in range(spec.layers)):
            raise UserError("--keep-mlp is for dense layers, and this model has experts in all; use --keep-experts")
        if self.experts is not None:
            _check_experts(self.experts, spec)
        per_token = 0 if spec.experts is None else spec.experts.per_token
        least = {"layers": 1, "heads": ratio, "mlp": 1, "experts": per_token}
        for name, most in _sizes(spec).items():
            kept = getattr(self, name)
            if kept is not None and not least[name] <= kept <= most:
                raise UserError(f"--keep-{name} is {kept}; the model has {most}, so give {least[name]} to {most}")
        if all(getattr(self, name) in (None, most) for name, most in _sizes(spec).items()):
            raise UserError(f"{self.describe(spec)} stay, so nothing is cut; keep fewer")

    def describe(self, spec: ModelSpec) -> str:
        """One line."""
        cuts = {name: getattr(self, name) for name in _sizes(spec)}
        told = {"mlp": "MLP channels", "heads": "heads", "layers": "layers", "experts": "experts"}
        return ", ".join(f"{kept} of {_sizes(spec)[n]} {told[n]}" for n, kept in cuts.items() if kept is not None)


def _check_heads(heads: int, spec: ModelSpec) -> None:
    """Refuse heads that cannot be taken out one by one."""
    together = "made of one vector" if spec.latent is not None else "normed together" if spec.qk_norm_joint else None
    if together is not None:
        raise UserError(f"--keep-heads: heads of {spec.family} models are {together} and cannot be cut; leave it out")
    ratio = spec.heads // spec.kv_heads
    if heads % ratio:
        raise UserError(f"--keep-heads is {heads}; {ratio} heads share keys, so give a multiple of {ratio}")


def _check_experts(count: int, spec: ModelSpec) -> None:
    """Refuse experts where there are none, and numbers that leave groups of different sizes."""
    if spec.experts is None:
        raise UserError(f"--keep-experts is {count}, but the model has no experts; use --keep-mlp")
    if count % spec.experts.groups:
        groups = spec.experts.groups
        raise UserError(f"--keep-experts is {count}; experts are in {groups} groups, so give a multiple of {groups}")


def _sizes(spec: ModelSpec) -> dict[str, int]:
    experts = 0 if spec.experts is None else spec.experts.count
    return {"layers": spec.layers, "heads": spec.heads, "mlp": spec.mlp_size, "experts": experts}


def cut_spec(spec: ModelSpec, kept: KeptShape, layers: Sequence[int]) -> ModelSpec:
    """The shape of the cut model; `layers` are the layers that stay, by their old numbers."""
    ratio = spec.heads // spec.kv_heads
    heads = spec.heads if kept.heads is None else kept.heads
    experts = spec.experts
    if experts is not None:
        dense = tuple(new for new, old in enumerate(layers) if old in experts.dense_layers)
        experts = replace(experts, count=kept.experts or experts.count, dense_layers=dense)
    windowed = tuple(new for new, old in enumerate(layers) if old in spec.window_layers)
    return replace(
        spec,
        layers=len(layers),
        heads=heads,
        kv_heads=heads // ratio,
        mlp_size=kept.mlp or spec.mlp_size,
        window_layers=windowed,
        window=spec.window if windowed else None,
        experts=experts,
    )


@torch.no_grad()
def block_influence(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """1 − cos(x, layer(x)), mean over tokens."""
    cosines = [F.cosine_similarity(x.double(), y.double(), dim=-1) for x, y in zip(inputs, outputs, strict=True)]
    return 1 - float(torch.cat([cosine.flatten() for cosine in cosines]).mean())


def refit(weight: Tensor, hessian: Tensor, kept: Tensor) -> Tensor:
    """The columns `kept` of a matrix [outputs, inputs], changed so that they make up for the removed ones."""
    wide, moment = weight.double(), hessian.double()
    own = moment[kept][:, kept]
    own.diagonal().add_(DAMPING * own.diagonal().mean().clamp(min=1e-30))
    return torch.linalg.solve(own, (wide @ moment[:, kept]).T).T.to(weight.dtype)


@dataclass(frozen=True)
class CutLayer:
    """The parameters that stay, by name in the layer; relative errors as compression reports them; new outputs."""

    state: dict[str, Tensor]
    errors: dict[str, float]
    outputs: list[Tensor]


@torch.no_grad()
def cut_layer(model: Decoder, index: int, kept: KeptShape, inputs: Sequence[Tensor]) -> CutLayer:
    """Cut layer `index`, the only one that `model` has; `inputs` are its calibration inputs, [B, T, H] each."""
    work = _LayerCut(model, layer_of(model, index), inputs)
    if kept.heads is not None:
        work.cut_heads(kept.heads)
    if kept.mlp is not None and not model.spec.is_routed(index):
        work.cut_channels(kept.mlp)
    if kept.experts is not None and model.spec.is_routed(index):
        work.cut_experts(kept.experts)
    return CutLayer(work.state(), work.errors, through(model, index, inputs))


class _LayerCut:
    """A layer while it is cut: removed parts are zeroed, so that it runs in its old shape, until `state` drops them."""

    def __init__(self, model: Decoder, layer: Layer, inputs: Sequence[Tensor]) -> None:
        self.model, self.layer, self.inputs = model, layer, inputs
        self.errors: dict[str, float] = {}
        self.rows: dict[str, Tensor] = {}
        """Rows that stay, by parameter."""
        self.columns: dict[str, Tensor] = {}

    def cut_heads(self, heads: int) -> None:
        """Keep the key/value heads, with their queries, that add most to the layer's output."""
        spec = self.model.spec
        ratio, size = spec.heads // spec.kv_heads, spec.head_dim
        hessian = observe(self.model, self.layer, self.inputs, ["attention.o"], stop=True)["attention.o"].hessian
        weight = linear(self.layer, "attention.o").weight
        own = hessian.view(spec.kv_heads, ratio * size, spec.kv_heads, ratio * size).diagonal(dim1=0, dim2=2)
        parts = weight.unflatten(1, (spec.kv_heads, ratio * size))
        worth = torch.einsum("ogi,ijg,ogj->g", parts, own, parts)
        groups = worth.topk(heads // ratio).indices.sort().values
        queries, keys = _spread(groups, ratio * size), _spread(groups, size)
        self._cut_columns("attention.o", hessian, queries)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            self._keep_rows(f"attention.{name}", rows)
        self.rows["attention.sinks"] = _spread(groups, ratio)

    def cut_channels(self, width: int) -> None:
        """Keep the MLP channels that add most to the layer's output."""
        hessian = observe(self.model, self.layer, self.inputs, ["mlp.down"], stop=True)["mlp.down"].hessian
        weight = linear(self.layer, "mlp.down").weight
        channels = (weight.square().sum(0) * hessian.diagonal()).topk(width).indices.sort().values
        self._cut_columns("mlp.down", hessian, channels)
        for name in ("mlp.gate", "mlp.up") if self.model.spec.gated else ("mlp.up",):
            self._keep_rows(name, channels)

    def cut_experts(self, count: int) -> None:
        """Keep the experts to which the most weight is routed."""
        mlp = self.layer.mlp
        assert isinstance(mlp, RoutedMlp)
        kept = best_experts(routed_weight(self.model, self.layer, self.inputs), count, mlp.experts_spec.groups)
        lost = torch.ones(len(mlp.router.weight), dtype=torch.bool, device=kept.device)
        lost[kept] = False
        self._keep_rows("mlp.router", kept)
        self.rows["mlp.correction"] = kept
        for name in EXPERT_STACKS:
            self.rows[name] = self.rows[f"{name}_bias"] = kept
        mlp.router.register_forward_hook(lambda module, x, scores: scores.masked_fill(lost, -torch.inf))
        if mlp.correction is not None:
            mlp.correction[lost] = -torch.inf

    def _keep_rows(self, name: str, rows: Tensor) -> None:
        self.rows[f"{name}.weight"] = self.rows[f"{name}.bias"] = rows

    def _cut_columns(self, name: str, hessian: Tensor, columns: Tensor) -> None:
        """Refit a matrix to some of its columns; the others are zero from now on."""
        module: nn.Linear = linear(self.layer, name)
        before = module.weight.clone()
        module.weight.zero_()
        module.weight[:, columns] = refit(before, hessian, columns)
        self.columns[f"{name}.weight"] = columns
        lost = output_error(module.weight - before, hessian)
        self.errors[name] = lost / max(output_error(before, hessian), 1e-30)

    def state(self) -> dict[str, Tensor]:
        """The parameters that stay."""
        cut = {}
        for name, tensor in self.layer.state_dict().items():
            if name in self.rows:
                tensor = tensor[self.rows[name]]
            cut[name] = tensor[:, self.columns[name]] if name in self.columns else tensor
        return cut


def _spread(groups: Tensor, size: int) -> Tensor:
    """Indices of all elements of `groups`, each of `size` elements."""
    return (groups[:, None] * size + torch.arange(size, device=groups.device)).flatten()


def best_experts(worth: Tensor, count: int, groups: int) -> Tensor:
    """Indices, ascending, of the `count` experts of the greatest worth, equally many from each group."""
    places = worth.view(groups, -1).topk(count // groups).indices.sort().values
    firsts = torch.arange(groups, device=worth.device) * (len(worth) // groups)
    return (firsts[:, None] + places).flatten()


def routed_weight(model: Decoder, layer: Layer, inputs: Sequence[Tensor]) -> Tensor:
    """The sum over tokens of the weights with which each expert is used."""
    mlp = layer.mlp
    assert isinstance(mlp, RoutedMlp)
    total = torch.zeros(mlp.experts_spec.count, device=mlp.router.weight.device)

    def add(module: nn.Module, arguments: tuple[Tensor, ...], logits: Tensor) -> None:
        weights, chosen = choose(scored(logits, mlp.experts_spec.score), mlp.experts_spec, mlp.correction)
        total.index_add_(0, chosen.flatten(), weights.flatten())

    handle = mlp.router.register_forward_hook(add)
    try:
        for x in inputs:
            run_layer(model, layer, x)
    finally:
        handle.remove()
    return total
