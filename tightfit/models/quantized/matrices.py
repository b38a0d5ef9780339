"""The matrices of a decoder that can be quantized, pruned or factored, by name. Nothing here imports torch."""

from tightfit.models.spec import Latent, ModelSpec

HEAD = "head"
"""The output projection, which is coded only by a step that says this name."""


def codable(spec: ModelSpec) -> dict[str, tuple[int, int, int]]:
    """Every matrix that a recipe can code: those of the layers, and the output projection."""
    return matrices(spec) | {HEAD: (1, spec.vocab_size, spec.hidden_size)}


def matrices(spec: ModelSpec) -> dict[str, tuple[int, int, int]]:
    """Every matrix of the layers that can be quantized: how many, outputs, inputs."""
    return {name: shape for i in range(spec.layers) for name, shape in matrices_of_layer(spec, i).items()}


def matrices_of_layer(spec: ModelSpec, layer: int) -> dict[str, tuple[int, int, int]]:
    """The same of one layer."""
    h = spec.hidden_size
    shapes = _attention(spec) if spec.latent is None else _latent_attention(spec, spec.latent)
    if not spec.is_routed(layer):
        shapes |= _mlp("mlp.", 1, h, spec.mlp_size, spec.gated)
    elif spec.experts is not None:
        shapes |= _mlp("mlp.experts.", spec.experts.count, h, spec.experts.mlp_size, True)
        if spec.experts.shared_size:
            shapes |= _mlp("mlp.shared.", 1, h, spec.experts.shared_size, True)
    return {f"layers.{layer}.{name}": shape for name, shape in shapes.items()}


def _attention(spec: ModelSpec) -> dict[str, tuple[int, int, int]]:
    h = spec.hidden_size
    return {
        "attention.q": (1, spec.query_size, h),
        "attention.k": (1, spec.kv_size, h),
        "attention.v": (1, spec.kv_size, h),
        "attention.o": (1, h, spec.query_size),
    }


def _latent_attention(spec: ModelSpec, latent: Latent) -> dict[str, tuple[int, int, int]]:
    """Without kv_b, which servers absorb into queries and outputs instead of expanding keys and values."""
    h, rank = spec.hidden_size, latent.query_rank
    queries = {"attention.q": (1, spec.query_size, h)}
    if rank:
        queries = {"attention.q_a": (1, rank, h), "attention.q_b": (1, spec.query_size, rank)}
    keys = {"attention.kv_a": (1, latent.kv_rank + latent.rope_dim, h)}
    return queries | keys | {"attention.o": (1, h, spec.output_size)}


def _mlp(prefix: str, count: int, hidden: int, width: int, gated: bool) -> dict[str, tuple[int, int, int]]:
    shapes = {f"{prefix}up": (count, width, hidden), f"{prefix}down": (count, hidden, width)}
    return shapes | ({f"{prefix}gate": (count, width, hidden)} if gated else {})
