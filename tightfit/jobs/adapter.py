"""Adapter: the section of a job that trains low-rank matrices on top of a frozen model (LoRA), without torch.

    y = W x + (alpha / rank) · B (A x)        A [rank, inputs], B [outputs, rank]

(Hu et al. 2021.) W has no gradient and no optimizer states; if it is quantized it stays so and is dequantized a matrix
at a time (QLoRA, Dettmers et al. 2023). A is initialised like torch's linear layers, B with zeros, as in PEFT.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tightfit.errors import UserError
from tightfit.jobs.projections import ALL_LINEAR, PROJECTIONS, Projection, check_target, linear_shapes, targeted
from tightfit.jobs.section import Section
from tightfit.models.quantized.held_weights import held_weights
from tightfit.models.quantized.scheme import UNREAD_BYTES, Scheme
from tightfit.models.spec import ModelSpec

LARGEST_RANK = 1024
HELD_GROUP = 64
"""Group size (neighbouring inputs per scale) of a base that is quantized as it is loaded."""
HeldBits = Literal[2, 4, 8]
"""Widths of such a base."""


def held_in(bits: int) -> Scheme:
    """The scheme of a base that is quantized to `bits` as it is loaded."""
    return Scheme(bits=bits, group=HELD_GROUP, symmetric=False)


def _short(names: object) -> object:
    """`q_proj`, as Hugging Face has it, is `q`; one name is a list of one."""
    if isinstance(names, str) and names != ALL_LINEAR:
        names = [names]
    if not isinstance(names, list):
        return names
    plain = [name.removesuffix("_proj") if isinstance(name, str) else name for name in names]
    return [short if short in PROJECTIONS else name for short, name in zip(plain, names, strict=True)]


def _ordered(names: list[str] | str) -> list[str] | str:
    """Each name once: projections in the model's order, then patterns. Lists that mean the same are then equal."""
    if isinstance(names, str):
        return names
    return [name for name in PROJECTIONS if name in names] + sorted(set(names).difference(PROJECTIONS))


class AdapterTraining(Section):
    rank: int | None = Field(default=None, ge=1, le=LARGEST_RANK)
    """Rank of the matrices that are trained while the model is frozen (LoRA). Without, the model itself is trained."""
    alpha: float = Field(default=16.0, gt=0)
    """The adapters' output is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping each of the adapters' inputs while training."""
    targets: Annotated[Literal["all-linear"] | list[str], BeforeValidator(_short), AfterValidator(_ordered)] = (
        "all-linear"
    )
    """Projections of every layer that get adapters: all of them, or some of q, k, v, o, gate, up, down, by these
    names, by Hugging Face's, or by globs or regular expressions of whole names."""
    bits: HeldBits | None = None
    """Quantize linear layers of an uncompressed model to this many bits as they are loaded (QLoRA); compressed models
    stay as they are."""

    @model_validator(mode="after")
    def _needs_a_rank(self) -> Self:
        usual = {name: field.default for name, field in type(self).model_fields.items()}
        given = ", ".join(name for name, default in usual.items() if getattr(self, name) != default)
        if self.rank is None and given:
            raise ValueError(f"adapter has {given}, but no rank; set adapter.rank or drop the section")
        if not self.targets:
            raise ValueError("adapter.targets is empty, so nothing would be trained; name projections, or all-linear")
        for target in () if self.targets == ALL_LINEAR else self.targets:
            check_target(target)
        return self

    @property
    def scale(self) -> float:
        """alpha / rank."""
        assert self.rank is not None
        return self.alpha / self.rank

    def projections(self, spec: ModelSpec | None = None) -> tuple[Projection, ...]:
        """The targeted projections in the model's order; without `spec`, only those of `targets` that are plain names,
        as patterns need the model's names."""
        if self.targets == ALL_LINEAR:
            return PROJECTIONS
        if spec is not None:
            return targeted(self.targets, spec)
        return tuple(name for name in PROJECTIONS if name in self.targets)

    @property
    def held(self) -> Scheme | None:
        """The scheme to which linear layers are quantized as they are loaded; None where they are not."""
        return None if self.bits is None else held_in(self.bits)

    def adapted(self, base: "FrozenBase | None" = None, *, spec: ModelSpec | None = None) -> "Adapted | None":
        """The adapters as a plan needs them, None without; `base` is a compressed model, `spec` the model's shape where
        it is known."""
        if self.rank is None:
            return None
        return Adapted(
            rank=self.rank,
            projections=self.projections(spec),
            drops=self.dropout > 0,
            base=base or FrozenBase(scheme=self.held),
        )

    def on(self, source: str, spec: ModelSpec) -> "Adapted | None":
        """These adapters on the model at `source`, whose shape is `spec`."""
        return None if self.rank is None else self.adapted(compressed_base(source, spec), spec=spec)


NOT_ADAPTED = AdapterTraining()


@dataclass(frozen=True, kw_only=True)
class FrozenBase:
    """How a frozen model's linear layers are held: as plain numbers, or quantized."""

    scheme: Scheme | None = None
    coded_bytes: int | None = None
    """Bytes of all linear layers by the model's files; None: computed from the scheme."""


def compressed_base(source: str, spec: ModelSpec) -> FrozenBase | None:
    """The compressed model in the directory `source`; None where it is something else."""
    folder = Path(source).expanduser()
    held = held_weights(folder, spec) if (folder / "config.json").is_file() else None
    if held is not None and held.head is not None:
        raise UserError(
            f"{source} has a coded output projection, which training cannot multiply by; train adapters on a model "
            "that was compressed without --head"
        )
    if held is None or held.scheme is None:
        return None
    return FrozenBase(scheme=held.scheme, coded_bytes=held.coded_bytes)


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """Adapters and their frozen model in memory."""

    rank: int
    projections: tuple[Projection, ...]
    drops: bool = False
    base: FrozenBase = FrozenBase()

    @property
    def settings(self) -> AdapterTraining:
        """The job section it comes from, without fields that take no memory."""
        targets: Any = ALL_LINEAR if self.projections == PROJECTIONS else list(self.projections)
        return AdapterTraining(rank=self.rank, targets=targets, dropout=0.1 if self.drops else 0.0)

    def has(self, *names: Projection) -> bool:
        """Whether any of these projections has an adapter."""
        return any(name in self.projections for name in names)

    def matrices(self, spec: ModelSpec) -> tuple[int, ...]:
        """Sizes of a layer's A and B, in the model's order."""
        shapes = [shape for name, shape in linear_shapes(spec).items() if name in self.projections]
        return tuple(self.rank * size for outputs, inputs in shapes for size in (inputs, outputs))

    def params(self, spec: ModelSpec) -> int:
        """Weights that are trained."""
        return spec.layers * sum(self.matrices(spec))

    def frozen_bytes(self, spec: ModelSpec, element_bytes: int) -> int:
        """Bytes of the frozen model: `element_bytes` per weight, or quantized linear layers and all else at that."""
        scheme, shapes = self.base.scheme, linear_shapes(spec).values()
        if scheme is None:
            return element_bytes * spec.params()
        coded = spec.layers * sum(outputs * inputs for outputs, inputs in shapes)
        by_scheme = spec.layers * sum(scheme.held_bytes(outputs, inputs) for outputs, inputs in shapes)
        coded_bytes = by_scheme if self.base.coded_bytes is None else self.base.coded_bytes
        return coded_bytes + element_bytes * (spec.params() - coded)

    def expanded_bytes(self, outputs: int, inputs: int, element_bytes: int, result_bytes: int) -> int:
        """Workspace of a product with a frozen quantized matrix: the dequantized matrix; or that of dequantizing, if it
        is more than matrix and product (`result_bytes`), which is allocated afterwards."""
        scheme, count = self.base.scheme, outputs * inputs
        if scheme is None:
            return 0
        # with quantized activations forward multiplies codes, but the gradient of the input needs the matrix in 16 bits
        expanding_bytes = UNREAD_BYTES * count if scheme.activations else scheme.expanded_bytes(outputs, inputs)
        return max(element_bytes * count, expanding_bytes - result_bytes)
