"""The linear layers of a decoder layer in the order they are computed, as sets that read the same input.

Methods that move magnitude between activations and weights (AWQ, SmoothQuant) multiply the input channels of a set by s
and divide by s what outputs those channels: a norm's weight, or the rows of the linear layer before (moving_scales.py).
Nothing here imports torch.
"""

from dataclasses import dataclass

from tightfit.models.spec import Latent, ModelSpec


@dataclass(frozen=True)
class LinearSet:
    """Linear layers `names` that read one input, and the module `before` that takes its scales, if there is one."""

    names: tuple[str, ...]
    before: str | None


def linear_sets(spec: ModelSpec, layer: int) -> list[LinearSet]:
    """The sets of a layer, without routers, which stay as they are, and experts, whose weights are stacked tensors."""
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
    """Sets of latent attention: kv_b stays as it is (matrices.py), so no scale of `o` can be folded into it."""
    first = "attention.q_a" if latent.query_rank else "attention.q"
    queries = [LinearSet(("attention.q_b",), "attention.q_a_norm")] if latent.query_rank else []
    return [LinearSet((first, "attention.kv_a"), "attention_norm"), *queries, LinearSet(("attention.o",), None)]


EXPERT_STACKS = ("mlp.experts.gate", "mlp.experts.up", "mlp.experts.down")
