"""Scheme: how the numbers of one weight matrix are coded, and what that costs in bits.

| kind | a number is | scales |
|---|---|---|
| `int` | (q − Z) · S, q of 2 to 8 bits; Z is 2^(bits−1) where symmetric | per group, row or tensor; float16, float32 |
| `binary` | ±S | the same |
| `nf4` | one of 16 quantiles of a normal distribution · S (QLoRA, 2023) | per 64, 8 bits each, float32 per 256 |
| `mxfp4` | a 4-bit float (e2m1) · S (OCP microscaling) | per 32, a power of two in 8 bits |
| `nvfp4` | a 4-bit float (e2m1) · S / G | per 16, e4m3, and one float32 G per tensor |
| `fp8` | an 8-bit float (e4m3) · S | per row or tensor, float32 |

`activations` says that the layer's inputs are rounded too: with a scale per token, computed at run time (dynamic), or
where they are `static` with one scale for all, from calibration, which files store.
A matrix is [outputs, inputs]; a group is `group` consecutive inputs of one output. Nothing here imports torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from tightfit.errors import UserError

Kind = Literal["int", "binary", "nf4", "mxfp4", "nvfp4", "fp8"]
Activations = Literal["int8", "fp8", "llm.int8"]
KINDS: tuple[Kind, ...] = ("int", "binary", "nf4", "mxfp4", "nvfp4", "fp8")
FIXED_GROUPS = {"nf4": 64, "mxfp4": 32, "nvfp4": 16}
FIXED_BITS = {"binary": 1, "nf4": 4, "mxfp4": 4, "nvfp4": 4, "fp8": 8}
PACKED_BITS = (2, 4, 8)
"""Widths of integers that kernels read packed; matrices of other widths are always dequantized."""
TABLED = ("binary", "nf4", "mxfp4", "nvfp4")
"""Kinds whose codes stand for the numbers of a table."""
WORD = 32
TILE_WORDS = 16
"""Words of a tile of the kernels (kernels/quantized/packing.py)."""
OUTLIER_ROWS, OUTLIER_TILE, MOST_OUTLIER_INPUTS = 32, 256, 2**16
"""Rows and columns of a tile, and the most columns, of kernels for weights with outliers
(kernels/quantized/spqr_layout.py)."""
CPU_GROUPS, CPU_ROWS = (32, 64, 128, 256), 64
"""Groups that torch's product with 4-bit codes on a CPU takes, and what outputs have to be whole multiples of
(kernels/quantized/int4_linear.py)."""
CPU_SCALE_BYTES = 4
"""Of a group, beside its scale: scale and offset as that product reads them."""
INPUT_SCALE_BYTES = 4
"""Bytes of the scale of static activations."""
NESTED_BLOCK = 256
"""Scales of NF4 that share a float32 scale of their own."""
UNREAD_BYTES = 7
"""Bytes per weight while codes are dequantized without a kernel: the code (1), float32 (4) and 16 bits (2)."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a weight is coded. `group` is inputs per scale, 0 for one scale a row, −1 for one scale in all."""

    kind: Kind = "int"
    bits: int = 4
    group: int = 128
    symmetric: bool = True
    activations: Activations | None = None
    static: bool = False
    outliers: bool = False
    """Whether single weights are kept in float16 beside the codes, and scales are coded too (SpQR)."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"number kind {self.kind!r} is unknown; use one of {', '.join(KINDS)}")
        if self.kind == "int" and not 2 <= self.bits <= 8:
            raise UserError(f"bits is {self.bits}; integers have 2 to 8 (1 bit is the kind binary)")
        if self.bits != FIXED_BITS.get(self.kind, self.bits):
            raise UserError(f"bits is {self.bits}, but {self.kind} numbers have {FIXED_BITS[self.kind]}")
        if self.group != FIXED_GROUPS.get(self.kind, self.group):
            raise UserError(f"group is {self.group}, but {self.kind} has groups of {FIXED_GROUPS[self.kind]}")
        if self.group < -1 or (self.kind == "fp8" and self.group > 0):
            raise UserError(
                f"group is {self.group} for {self.kind}; give 0 for one scale a row, −1 for one a tensor"
                + ("" if self.kind == "fp8" else ", or how many inputs share a scale")
            )
        if self.kind != "int" and not self.symmetric:
            raise UserError(f"{self.kind} numbers are symmetric about zero; only integers can have a zero point")
        if self.activations not in (None, *get_args(Activations)):
            known = ", ".join(get_args(Activations))
            raise UserError(f"activations are {self.activations!r}, which is unknown; use one of {known}, or none")
        if self.activations is not None and (self.bits != 8 or self.group > 0 or not self.symmetric):
            weights = f"bits {self.bits}, group {self.group}{', symmetric' * self.symmetric}"
            raise UserError(
                f"activations are {self.activations}, beside weights of {weights}; only those of bits 8, group 0, "
                "symmetric go with them: take these, or leave activations out"
            )
        if self.activations is not None and (self.activations == "fp8") != (self.kind == "fp8"):
            raise UserError(
                f"{self.activations} activations are multiplied by weights of their own kind, not {self.kind}"
            )
        if self.static and self.activations not in ("int8", "fp8"):
            given = self.activations or "not rounded"
            raise UserError(f"static scales are for int8 and fp8 activations, but these are {given}; use one of both")

    @property
    def levels(self) -> int:
        """How many different codes there are."""
        return int(2**self.bits)

    @property
    def middle(self) -> int:
        """The code of zero where integers are symmetric."""
        return self.levels // 2

    @property
    def is_by_row(self) -> bool:
        """Whether rows are coded one by one: no scale spans rows, as NF4's and NVFP4's do."""
        return self.group >= 0 and not self.outliers and self.kind not in ("nf4", "nvfp4")

    def groups(self, inputs: int) -> int:
        """Scales of one row of `inputs` weights."""
        return 1 if self.group <= 0 else -(-inputs // self.group)

    def check(self, outputs: int, inputs: int, name: str) -> None:
        """Refuse a matrix that cannot be cut into whole groups."""
        if self.group > 0 and inputs % self.group:
            fits = [g for g in (256, 128, 64, 32, 16, 8) if inputs % g == 0]
            is_free = self.kind in ("int", "binary") and not self.outliers
            fix = f"use a group of {fits[0]}" if fits and is_free else "use int numbers with one scale a row"
            raise UserError(f"{name} has {inputs} inputs, which are no whole groups of {self.group}; {fix}")

    def weight_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of the packed codes with their scales and zero points, outliers aside."""
        words = -(-inputs * self.bits // WORD)
        return outputs * words * 4 + self._scale_bytes(outputs, self.groups(inputs)) + INPUT_SCALE_BYTES * self.static

    def held_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes in memory (linear.py), where a zero point takes a byte, and the mean of NF4's scales four."""
        groups = self.groups(inputs)
        points = 1 if self.group < 0 else outputs * groups
        narrow = 0 if self.outliers else points - self._zero_bytes(outputs, groups)
        return self.weight_bytes(outputs, inputs) + (0 if self.symmetric else narrow) + 4 * (self.kind == "nf4")

    def expanded_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes beside the packed matrix that a product takes on a GPU: the matrix in 16 bits, and intermediates.

        Where rows are many, integers that a kernel reads are expanded in one step. Others go through float32, and those
        of tables through indices too; 8-bit integers whose inputs are rounded are multiplied as they are.
        """
        if self.activations == "int8":
            return 0
        is_read = self.is_read_packed(inputs) or self.is_read_with_outliers(outputs, inputs)
        return outputs * inputs * (2 if is_read else 10 if self.kind in TABLED else UNREAD_BYTES)

    def is_read_packed(self, inputs: int) -> bool:
        """Whether kernels/quantized/quantized_linear.py reads rows of `inputs` codes packed."""
        if self.kind != "int" or self.outliers or self.activations is not None or self.bits not in PACKED_BITS:
            return False
        tile, group = TILE_WORDS * WORD // self.bits, max(self.group, 0)
        return inputs % tile == 0 and group % WORD == 0 and (group == 0 or group % tile == 0 or tile % group == 0)

    def is_read_by_cpus(self, outputs: int, inputs: int) -> bool:
        """Whether kernels/quantized/int4_linear.py reads a matrix of this shape packed, on a CPU that can."""
        is_plain = self.kind == "int" and self.bits == 4 and self.activations is None and not self.outliers
        return is_plain and self.group in CPU_GROUPS and inputs % self.group == 0 and outputs % CPU_ROWS == 0

    def is_read_with_outliers(self, outputs: int, inputs: int) -> bool:
        """Whether kernels/quantized/spqr_linear.py reads a matrix of this shape packed."""
        whole = outputs % OUTLIER_ROWS == 0 and inputs % OUTLIER_TILE == 0 and inputs <= MOST_OUTLIER_INPUTS
        return self.kind == "int" and self.outliers and self.bits in (2, 3, 4) and whole

    def _zero_bytes(self, outputs: int, groups: int) -> int:
        """Zero points in files, packed as codes are; one for the tensor takes a byte."""
        if self.symmetric or self.group < 0:
            return 0 if self.symmetric else 1
        return -(-outputs * self.bits // WORD) * 4 * groups

    def _scale_bytes(self, outputs: int, groups: int) -> int:
        count = outputs * groups
        if self.outliers:  # 3 bits each for scale and zero point, and two float16 pairs per 16 rows
            return groups * (2 * -(-outputs * 3 // WORD) * 4 + -(-outputs // 16) * 8)
        if self.kind == "nf4":
            return count + -(-count // NESTED_BLOCK) * 4
        if self.kind in ("mxfp4", "nvfp4"):
            return count + 4 * (self.kind == "nvfp4")
        per_scale = 2 if self.group > 0 else 4
        return (1 if self.group < 0 else count) * per_scale + self._zero_bytes(outputs, groups)

    def describe(self) -> str:
        """As people write it: int4 g128 asym, fp8, nf4."""
        rounded = f" ({'static ' if self.static else ''}{self.activations} activations)" if self.activations else ""
        if self.kind != "int":
            return f"{self.kind}{rounded}"
        span = f"g{self.group}" if self.group > 0 else ("per channel" if self.group == 0 else "per tensor")
        return f"int{self.bits} {span}{'' if self.symmetric else ' asym'}{rounded}"


def needs_blocks(schemes: Iterable[Scheme]) -> bool:
    """Whether transformers loads these codes of one directory only if asymmetric groups are blocks of one row.

    compressed-tensors 0.20 loads no zero points that are packed, as those of groups and rows are: transformers 5.23 has
    to expand such weights while it loads them, and does so by one scheme for all. Zero points of blocks are not packed:
    they take a byte each in files too. Rows stay as they are, as the width of a block would be theirs.
    """
    known = set(schemes)
    spans = [scheme.group for scheme in known if scheme.kind == "int" and not scheme.symmetric and scheme.group >= 0]
    return len(known) > 1 and bool(spans) and min(spans) > 0
