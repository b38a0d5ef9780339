"""What other engines keep of a layer that ours does not: copies that unfused operations leave for backward.

Ours keep the inputs of fused kernels and compute the rest again (saved.py). Code in single operations keeps what goes
into each: a float32 copy of what a norm scales, rope's halves, the activated gate and the product. Where tensor ranks
gather a block's input, some engines keep it whole, ours gather it again.
"""

from tightfit.jobs.engine import ENGINES, EngineMemory
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.saved import SavedTensor
from tightfit.models.spec import ModelSpec


def engine_saved(spec: ModelSpec, layer: int, shape: LocalShape) -> list[SavedTensor]:
    """Of a layer that is not computed again."""
    if shape.engine_name == "tightfit":
        return []
    memory = ENGINES[shape.engine_name].memory
    norms = memory.norm_copies if spec.norm != "layer" else min(1.0, memory.norm_copies)
    rope = memory.rope_copies if spec.rope is not None else 0.0
    turned_bytes = shape.query_bytes(spec) + shape.key_bytes(spec)
    columns = spec.mlp_size
    if spec.experts is not None and spec.is_routed(layer):
        columns = spec.experts.per_token * spec.experts.mlp_size + spec.experts.shared_size
    gate_bytes = (memory.gate_copies if spec.gated else memory.activation_copies) * shape.inner_bytes(columns)
    return [
        SavedTensor("norms", "unfused norms", int(norms * shape.stream_bytes(spec)), "single operations keep copies"),
        SavedTensor("attention", "unfused rope", int(rope * turned_bytes), "products with sine and cosine"),
        SavedTensor("mlp", "unfused activation", int(gate_bytes), "activated gate and product are kept"),
        *_gathered(spec, shape, memory),
    ]


def _gathered(spec: ModelSpec, shape: LocalShape, memory: EngineMemory) -> list[SavedTensor]:
    """The inputs of both blocks, whole on every tensor rank."""
    if not (memory.keeps_gathered and shape.sequence_parallel):
        return []
    more_bytes = 2 * (shape.hidden_bytes(spec) - shape.stream_bytes(spec))
    return [SavedTensor("attention", "gathered inputs", more_bytes, "kept instead of gathered again")]
