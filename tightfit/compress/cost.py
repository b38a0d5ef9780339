"""What compressing will cost, told before it begins: bytes of the result, memory while at work, arithmetic.

| | bytes |
|---|---|
| result | codes, scales and zero points of every quantized matrix, the rest in 2 bytes (zeros of a pruned one too) |
| memory | one layer in float32 and its codes; H of one set of inputs, its factor and inverse; a batch's activations |
| | the calibration rows in three places (a layer's inputs, its wanted outputs and its new ones) |
| arithmetic | per token: every layer's forward pass 4.5 times (two whole, four parts), x xᵀ of every set's inputs |

Bytes of the result are exact but for SpQR's outliers and file headers. Nothing here imports torch.
"""

from dataclasses import dataclass

from tightfit.compress.recipe import Recipe, Step
from tightfit.errors import UserError
from tightfit.models.quantized.scheme import Scheme
from tightfit.models.spec import ModelSpec

FORWARD_PASSES = 4.5
OUTLIER_BYTES = 6
"""A column number of four bytes and a float16."""


@dataclass(frozen=True)
class CompressionCost:
    """Predicted or measured; `flops` is predicted only."""

    result_bytes: int
    original_bytes: int
    memory_bytes: int
    bits_per_weight: float
    flops: float = 0.0
    seconds: float | None = None


def matrices(spec: ModelSpec) -> dict[str, tuple[int, int, int]]:
    """Every matrix of the layers that can be quantized: how many, outputs, inputs."""
    h, found = spec.hidden_size, dict[str, tuple[int, int, int]]()
    for i in range(spec.layers):
        shapes = {
            "attention.q": (1, spec.query_size, h),
            "attention.k": (1, spec.kv_size, h),
            "attention.v": (1, spec.kv_size, h),
            "attention.o": (1, h, spec.query_size),
        }
        if not spec.is_routed(i):
            shapes |= _mlp("mlp.", 1, h, spec.mlp_size, spec.gated)
        elif spec.experts is not None:
            shapes |= _mlp("mlp.experts.", spec.experts.count, h, spec.experts.mlp_size, True)
            if spec.experts.shared_size:
                shapes |= _mlp("mlp.shared.", 1, h, spec.experts.shared_size, True)
        found |= {f"layers.{i}.{name}": shape for name, shape in shapes.items()}
    return found


def _mlp(prefix: str, count: int, hidden: int, width: int, gated: bool) -> dict[str, tuple[int, int, int]]:
    made = {f"{prefix}up": (count, width, hidden), f"{prefix}down": (count, hidden, width)}
    return made | ({f"{prefix}gate": (count, width, hidden)} if gated else {})


CANNOT_KEEP_ZEROS = ("spqr", "binary")


def pruned(spec: ModelSpec, recipe: Recipe) -> dict[str, Step]:
    """The step of every matrix that is pruned, each found to be cut into whole groups of N:M."""
    found: dict[str, Step] = {}
    for name, (_, _, inputs) in matrices(spec).items():
        step, coding = recipe.pruning(name), recipe.coding(name)
        if step is None:
            continue
        if coding is not None and coding.method in CANNOT_KEEP_ZEROS:
            raise UserError(f"{name} is pruned and then coded by {coding.method}, which has no code for zero; use gptq")
        if step.kept_of_group is not None and inputs % step.kept_of_group[1]:
            raise UserError(f"{name} has {inputs} inputs, which are no whole groups for pattern {step.pattern}")
        found[name] = step
    return found


def schemes(spec: ModelSpec, recipe: Recipe) -> dict[str, Scheme]:
    """The scheme of every matrix that is quantized, each found to be cut into whole groups."""
    found: dict[str, Scheme] = {}
    for name, (_, outputs, inputs) in matrices(spec).items():
        step = recipe.coding(name)
        scheme = None if step is None else step.scheme()
        if scheme is not None:
            scheme.check(outputs, inputs, name)
            found[name] = scheme
    return found


def predict(spec: ModelSpec, recipe: Recipe, rows: int, length: int) -> CompressionCost:
    """The cost of compressing a model of this shape with `rows` calibration rows of `length` tokens."""
    chosen, shapes = schemes(spec, recipe), matrices(spec)
    coded = weights = 0
    for name, scheme in chosen.items():
        count, outputs, inputs = shapes[name]
        step = recipe.coding(name)
        outliers = step.outlier_share * outputs * inputs * OUTLIER_BYTES if step is not None and scheme.outliers else 0
        coded += count * (scheme.weight_bytes(outputs, inputs) + int(outliers))
        weights += count * outputs * inputs
    head = spec.vocab_size * spec.hidden_size if spec.tied and recipe.rotation is not None else 0
    plain = 2 * (spec.params() + head - weights)
    return CompressionCost(
        result_bytes=coded + plain,
        original_bytes=2 * spec.params(),
        memory_bytes=_memory(spec, rows * length),
        bits_per_weight=8 * coded / max(weights, 1),
        flops=_flops(spec, rows * length),
    )


def _memory(spec: ModelSpec, tokens: int) -> int:
    layer = max(spec.layer_params(i) for i in range(spec.layers))
    widest = max(inputs for _, _, inputs in matrices(spec).values())
    moments = 3 * 4 * widest**2
    stream = 3 * 4 * tokens * spec.hidden_size
    batch = 4 * min(tokens, 8192) * (4 * spec.hidden_size + 3 * spec.mlp_size)
    return max(4 * layer * 3 + moments + batch, 4 * spec.embedding_params * 2) + stream


def _flops(spec: ModelSpec, tokens: int) -> float:
    per_token = 2.0 * sum(spec.layer_params(i, active=True) for i in range(spec.layers))
    moments = 2.0 * spec.layers * (2 * spec.hidden_size**2 + spec.query_size**2 + spec.mlp_size**2)
    return tokens * (FORWARD_PASSES * per_token + moments)
