"""What compressing will cost, predicted before it begins: bytes of the result, peak memory, arithmetic.

| | bytes |
|---|---|
| result | codes, scales and zero points of every quantized matrix, the rest in 2 bytes (zeros of a pruned one too) |
| memory | the largest phase of the ledger (memory.py) |
| arithmetic | per token: every layer's forward pass 4.5 times (two whole, four parts), x xᵀ of every set's inputs |

Bytes of the result are exact in compressed-tensors but for the number of outliers that SpQR finds, file headers, and
shapes; other layouts pack scales and zero points a little differently. Nothing here imports torch.
"""

from dataclasses import dataclass, replace

from tightfit.compress.memory import compression_ledger
from tightfit.compress.recipe import Recipe, Step
from tightfit.errors import UserError
from tightfit.memory.ledger import Ledger
from tightfit.models.quantized.matrices import HEAD, codable, matrices
from tightfit.models.quantized.scheme import Scheme, needs_blocks
from tightfit.models.spec import ModelSpec

FORWARD_PASSES = 4.5
PLAIN_BYTES = 2
OUTLIER_BYTES = 6
"""A column number of four bytes and a float16."""
START_BYTES = 4
"""The offset of a row's first outlier."""
TABLE_BYTES = 4 * (16 + 256)
"""The float32 codebooks of NF4's codes and of its 8-bit scales, which bitsandbytes stores with every matrix."""


@dataclass(frozen=True)
class CompressionCost:
    """Predicted or measured; `flops` is predicted only."""

    result_bytes: int
    original_bytes: int
    memory_bytes: int
    bits_per_weight: float
    flops: float = 0.0
    seconds: float | None = None
    ledger: Ledger | None = None
    """What `memory_bytes` is made of, predicted only."""
    calibration: str = ""
    """The calibration rows in a few words."""
    kl: float | None = None
    """KL(original ‖ compressed), nats a token, on some calibration rows; only `--fit` predicts it."""
    transformers_limit: str = ""
    """Why transformers does not load the result, where that is known."""

    def after(self, measuring: Ledger | None) -> "CompressionCost":
        """This cost with the phases of the ledger `measuring`, which ran before in the same process."""
        if measuring is None or self.ledger is None:
            return self
        ledger = self.ledger.with_lines(measuring.lines)
        return replace(self, ledger=ledger, memory_bytes=ledger.peak_allocated_bytes())


CANNOT_KEEP_ZEROS = ("spqr", "binary", "round")


def pruned(spec: ModelSpec, recipe: Recipe) -> dict[str, Step]:
    """The step of every matrix that is pruned; refuse rows that are no whole groups of N:M, and codes without zero."""
    found: dict[str, Step] = {}
    for name, (_, _, inputs) in matrices(spec).items():
        step, coding = recipe.pruning(name), recipe.coding(name)
        if step is None:
            continue
        if coding is not None and coding.method in CANNOT_KEEP_ZEROS:
            why = "has no code for zero or would move it"
            raise UserError(f"{name} is pruned and then coded by {coding.method}, which {why}; use gptq")
        if step.kept_of_group is not None and inputs % step.kept_of_group[1]:
            raise UserError(
                f"{name} has {inputs} inputs, which are no whole groups for pattern {step.pattern}; give another M"
            )
        found[name] = step
    return found


def schemes(spec: ModelSpec, recipe: Recipe) -> dict[str, Scheme]:
    """The scheme of every matrix that is quantized; refuse one that does not fit the matrix or saves nothing."""
    found: dict[str, Scheme] = {}
    for name, (_, outputs, inputs) in codable(spec).items():
        step = recipe.coding(name)
        scheme = None if step is None else step.scheme()
        if scheme is not None:
            scheme.check(outputs, inputs, name)
            if scheme.weight_bytes(outputs, inputs) >= PLAIN_BYTES * outputs * inputs:
                told = f"{name} in {scheme.describe()} is no smaller than in 16 bits"
                raise UserError(f"{told}: scales take more than codes save; give larger groups or fewer bits")
            if scheme.static and ".experts." in name:
                raise UserError(f"{name} cannot round inputs statically, as experts do not; keep them, or drop static")
            found[name] = scheme
    return found


def predict(spec: ModelSpec, recipe: Recipe, rows: int, length: int, *, writing_bytes: int = 0) -> CompressionCost:
    """The cost of compressing a model of this shape with `rows` calibration rows of `length` tokens.

    `writing_bytes` is the size of a number while the model generates these rows itself; 0 where text is given.
    """
    chosen, shapes = schemes(spec, recipe), codable(spec)
    coded = weights = tables = 0
    stored_bytes = Scheme.held_bytes if needs_blocks(chosen.values()) else Scheme.weight_bytes
    for name, scheme in chosen.items():
        count, outputs, inputs = shapes[name]
        step = recipe.coding(name)
        outliers = 0
        if step is not None and scheme.outliers:
            outliers = int(step.outlier_share * outputs * inputs * OUTLIER_BYTES) + START_BYTES * (outputs + 1)
        coded += count * (stored_bytes(scheme, outputs, inputs) + outliers)
        tables += count * TABLE_BYTES * (scheme.kind == "nf4")
        weights += count * outputs * inputs
    head = spec.vocabulary_params if spec.tied and unties(recipe) else 0
    plain = 2 * (spec.params() + head - weights)
    ledger = compression_ledger(spec, recipe, rows, length, writing_bytes=writing_bytes)
    return CompressionCost(
        result_bytes=coded + tables + plain,
        original_bytes=2 * spec.params(),
        memory_bytes=ledger.peak_allocated_bytes(),
        ledger=ledger,
        bits_per_weight=8 * coded / max(weights, 1),
        flops=_flops(spec, rows * length),
    )


def unties(recipe: Recipe) -> bool:
    """Whether the result has an output projection beside its embedding, where one matrix was both: it is rotated in
    another way, or coded."""
    return recipe.rotation is not None or recipe.coding(HEAD) is not None


def _flops(spec: ModelSpec, tokens: int) -> float:
    per_token = 2.0 * sum(spec.layer_params(i, active=True) for i in range(spec.layers))
    moments = 2.0 * spec.layers * (2 * spec.hidden_size**2 + spec.query_size**2 + spec.mlp_size**2)
    return tokens * (FORWARD_PASSES * per_token + moments)
