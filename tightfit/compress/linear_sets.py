"""The linear layers of a decoder layer in the order they are computed, those with one input together.

Methods that move magnitude between activations and weights (AWQ, SmoothQuant) multiply the input channels of a set by s
and divide what makes those channels by s: a norm's weight, or the rows of the layer before (moving_scales.py). Nothing
here imports torch.
"""

from dataclasses import dataclass

from tightfit.models.spec import Latent, ModelSpec


@dataclass(frozen=True)
class LinearSet:
    """Linear layers `names` of one input, and the module `before` whose outputs that input is, channel by channel."""

    names: tuple[str, ...]
    before: str | None


def linear_sets(spec: ModelSpec, layer: int) -> list[LinearSet]:
    """The sets of a layer. Routers stay as they are; stacked experts are not linear layers and come apart."""
    sets = _attention_sets(spec) if spec.latent is None else _latent_sets(spec.latent)
    if not spec.is_routed(layer):
        inner = ("mlp.gate", "mlp.up") if spec.gated else ("mlp.up",)
        return [*sets, LinearSet(inner, "mlp_norm"), LinearSet(("mlp.down",), "mlp.up" if spec.gated else None)]
    if spec.experts is not None and spec.experts.shared_size:
        sets += [
            LinearSet(("mlp.shared.gate", "mlp.shared.up"), None),
            LinearSet(("mlp.shared.down",), "mlp.shared.up"),
        ]
    return sets


def _attention_sets(spec: ModelSpec) -> list[LinearSet]:
    values_are_heads = spec.heads == spec.kv_heads
    return [
        LinearSet(("attention.q", "attention.k", "attention.v"), "attention_norm"),
        LinearSet(("attention.o",), "attention.v" if values_are_heads else None),
    ]


def _latent_sets(latent: Latent) -> list[LinearSet]:
    """kv_b stays as it is (matrices.py), and so do the values that it makes."""
    first = "attention.q_a" if latent.query_rank else "attention.q"
    queries = [LinearSet(("attention.q_b",), "attention.q_a_norm")] if latent.query_rank else []
    return [LinearSet((first, "attention.kv_a"), "attention_norm"), *queries, LinearSet(("attention.o",), None)]


EXPERT_STACKS = ("mlp.experts.gate", "mlp.experts.up", "mlp.experts.down")
