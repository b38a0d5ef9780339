"""The matrices of a decoder's layers that can be quantized, pruned or factored, by name. Nothing here imports torch."""

from tightfit.models.spec import ModelSpec


def matrices(spec: ModelSpec) -> dict[str, tuple[int, int, int]]:
    """Every matrix of the layers that can be quantized: how many, outputs, inputs."""
    return {name: shape for i in range(spec.layers) for name, shape in matrices_of_layer(spec, i).items()}


def matrices_of_layer(spec: ModelSpec, layer: int) -> dict[str, tuple[int, int, int]]:
    """The same of one layer."""
    h = spec.hidden_size
    shapes = {
        "attention.q": (1, spec.query_size, h),
        "attention.k": (1, spec.kv_size, h),
        "attention.v": (1, spec.kv_size, h),
        "attention.o": (1, h, spec.query_size),
    }
    if not spec.is_routed(layer):
        shapes |= _mlp("mlp.", 1, h, spec.mlp_size, spec.gated)
    elif spec.experts is not None:
        shapes |= _mlp("mlp.experts.", spec.experts.count, h, spec.experts.mlp_size, True)
        if spec.experts.shared_size:
            shapes |= _mlp("mlp.shared.", 1, h, spec.experts.shared_size, True)
    return {f"layers.{layer}.{name}": shape for name, shape in shapes.items()}


def _mlp(prefix: str, count: int, hidden: int, width: int, gated: bool) -> dict[str, tuple[int, int, int]]:
    made = {f"{prefix}up": (count, width, hidden), f"{prefix}down": (count, hidden, width)}
    return made | ({f"{prefix}gate": (count, width, hidden)} if gated else {})
