"""Number of torch operations per layer of a serving step on a CPU, where the call overhead of an operation is longer
than its computation for a few tokens.

A plain layer runs over joined weights (serve/weights/joint.py), single tokens in as few operations as torch allows.
Families with other norms, experts, sinks or latent attention run through the decoder's own modules: a product for every
projection, keys and values stored separately, a loop over experts. The numbers count torch's dispatches in our code;
tests/plan/serving/test_cpu_operations.py counts them again.
"""

from tightfit.models.spec import ModelSpec

PLAIN_SINGLE, PLAIN_PROMPT = 42, 77
"""Operations of a layer over joined weights: in a decode step, and in a step with prefill."""
PLAIN_QK_NORM = 8
OWN = 42
"""Operations of a layer that runs through its modules, without norms, gate and rope: projections, cache, attention,
residuals."""
NORM = {"layer": 1, "rms": 1, "rms_plus_one": 6}
GATE, ROPE, SOFTCAP, SINKS, LATENT = 2, 18, 13, 24, 20
ROUTED, PER_EXPERT, SHARED, SHARED_GATE, EXPERT_BIASES, CORRECTED = 57, 3, 5, 2, 10, 21
"""Operations beyond a dense MLP's: routing and sorting of rows, three products per expert, and extras of families."""


def runs_joint(spec: ModelSpec) -> bool:
    """Whether the engine joins projections (q, k, v; gate, up) of these layers: dense and gated, RMSNorms before
    attention and MLP, rotary positions."""
    plain = spec.norm in ("rms", "rms_plus_one") and not spec.sandwich_norms and spec.gated
    apart = spec.latent is not None or spec.qk_norm_joint or spec.sinks
    return plain and not apart and spec.rope is not None and spec.experts is None


def step_operations(spec: ModelSpec, *, prompts: bool) -> int:
    """Operations of all layers in a decode step, or in one with prefill of `prompts`."""
    if runs_joint(spec):
        plain = PLAIN_PROMPT if prompts else PLAIN_SINGLE
        return spec.layers * (plain + PLAIN_QK_NORM * spec.qk_norm)
    return sum(_own_operations(spec, layer) for layer in range(spec.layers))


def _own_operations(spec: ModelSpec, layer: int) -> int:
    """Operations of a layer that runs through its modules."""
    norms = spec.norms_per_layer + 2 * spec.qk_norm
    count = OWN + norms * NORM[spec.norm] + GATE * spec.gated + ROPE * (spec.rope is not None)
    count += SOFTCAP * (spec.attention_softcap is not None) + SINKS * spec.sinks + LATENT * (spec.latent is not None)
    return count + (_routed_operations(spec) if spec.is_routed(layer) else 0)


def _routed_operations(spec: ModelSpec) -> int:
    experts = spec.experts
    assert experts is not None
    shared = (SHARED + SHARED_GATE * experts.shared_gated) * (experts.shared_size > 0)
    extra = EXPERT_BIASES * spec.mlp_bias + CORRECTED * experts.corrected
    return ROUTED + PER_EXPERT * experts.count + shared + extra
