"""The rows of the table of compression quality: our methods at every width, and other packages' same methods."""

from dataclasses import dataclass
from typing import Any

from tightfit.compress.cost import predict
from tightfit.compress.gguf.gguf_export import GgufCoder
from tightfit.compress.recipe import Recipe, Step, recipe_of
from tightfit.models.quantized.matrices import matrices
from tightfit.models.quantized.ranges import RULES
from tightfit.models.quantized.scheme import Scheme
from tightfit.models.spec import ModelSpec

HQQ_STATISTIC_BITS = 32
"""A scale and a zero point of 16 bits each, a group."""
MIXTURES = {"q8_0": 8, "q6_k": 6, "q5_k_m": 5, "q4_k_m": 4, "q4_1": 4, "q4_0": 4}

NOT_DOWN = ("*.attention.*", "*.mlp.gate", "*.mlp.up")
"""Layers whose inputs have no outliers of a few tokens."""

GGUF_FEEDBACK = "gguf+gptq"
"""The same blocks with codes chosen as `tightfit export --data` chooses them."""


@dataclass(frozen=True)
class Entry:
    """One row: a recipe of ours or another package's coder under the same recipe; or a mixture of GGUF types."""

    name: str
    recipe: Recipe
    package: str | None = None
    mixture: str | None = None
    importance: bool = False

    @property
    def bits(self) -> int:
        """The nominal width."""
        if self.mixture is not None:
            return MIXTURES[self.mixture]
        return self.scheme().bits

    def scheme(self) -> Scheme:
        """How numbers are coded where that is no mixture."""
        scheme = self.recipe.steps[-1].scheme()
        assert scheme is not None
        return scheme

    def describe(self) -> str:
        """How numbers are coded, and how calibration found the range of inputs where that is static."""
        if self.mixture is not None:
            return self.mixture + (", importance" if self.importance else "")
        rule = self.recipe.steps[-1].static
        return self.scheme().describe() + ("" if rule is None else f", {rule}")

    def kind(self, name: str, spec: ModelSpec) -> str:
        """The GGUF type of a matrix."""
        assert self.mixture is not None
        _, outputs, inputs = matrices(spec)[name]
        return GgufCoder(spec, self.mixture).kind(f"{name}.weight", (outputs, inputs))

    def bits_per_weight(self, spec: ModelSpec) -> float:
        """Bits a weight of the coded matrices, scales and zero points included."""
        if self.mixture is not None:
            return self._block_bits(spec)
        if self.package == "hqq":
            return self.bits + HQQ_STATISTIC_BITS / self.scheme().group
        return predict(spec, self.recipe, 0, 0).bits_per_weight

    def _block_bits(self, spec: ModelSpec) -> float:
        import gguf

        bits = weights = 0.0
        for name, (count, outputs, inputs) in matrices(spec).items():
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.kind(name, spec)]]
            weights += count * outputs * inputs
            bits += count * outputs * inputs * 8 * block_bytes / block
        return bits / weights


WIDTHS = (4, 3, 2, 5, 6, 8)


def entries(group: int, steps: int) -> list[Entry]:
    """Every method at every width in groups of `group` inputs, what takes minutes a model last: a run that is stopped
    has most rows of the table then."""
    made = [Entry("binary", recipe_of("binary", group=group))]
    for bits in WIDTHS:
        made += [*_gptq(bits, group), *_nearest(bits, group), *_scaled(bits, group), *_named(bits), *_blocks(bits)]
    return [*made, *(entry for bits in WIDTHS for entry in _learned(bits, group, steps))]


def _learned(bits: int, group: int, steps: int) -> list[Entry]:
    """Rounding learned in so many steps a layer: ours, the same after a rotation, and AutoRound's."""
    settings = {"bits": bits, "group": group, "symmetric": False, "steps": steps}
    plain = recipe_of("round", **settings)
    turned = [Entry("rotate+round", recipe_of("rotate+round", **settings))] if bits < 8 else []
    return [Entry("round", plain), *turned, Entry("auto-round", plain, "auto-round")]


def _gptq(bits: int, group: int) -> list[Entry]:
    """GPTQ as we make it, with groups in the order of rounding, after a rotation; and as others make it."""
    settings = {"bits": bits, "group": group, "symmetric": False}
    plain = recipe_of("gptq", **settings, ranges="minmax")
    made = [
        Entry("gptq", recipe_of("gptq", **settings)),
        Entry("gptq", plain, "llm-compressor"),
        Entry("gptq", plain, "gptqmodel"),
    ]
    if bits < 8:
        made.append(Entry("gptq act-order", recipe_of("gptq", **settings, act_order="groups")))
        made.append(Entry("rotate+gptq", recipe_of("rotate+gptq", **settings)))
    return made


def _nearest(bits: int, group: int) -> list[Entry]:
    """Rounding to nearest, and HQQ, which sees no data either."""
    plain = recipe_of("rtn", bits=bits, group=group, symmetric=False)
    return [Entry("rtn", plain), Entry("rtn", plain, "torchao"), Entry("hqq", plain, "hqq")]


def _scaled(bits: int, group: int) -> list[Entry]:
    """Methods that move scales first."""
    recipe = recipe_of("awq", bits=bits, group=group, symmetric=False)
    made = [Entry("awq", recipe), Entry("awq", recipe, "llm-compressor")]
    if bits < 8:
        return made
    smooth = recipe_of("smoothquant")
    return [*made, Entry("smoothquant", smooth), Entry("smoothquant", smooth, "llm-compressor"), *_rounded_inputs()]


def _rounded_inputs() -> list[Entry]:
    """8-bit weights and inputs: a scale per token beside one scale a layer by every rule of calibration."""
    rows: dict[str, Any] = {"bits": 8, "group": 0, "symmetric": True, "activations": "int8"}
    made = [Entry("rtn", recipe_of("rtn", **rows))]
    for rule in RULES:
        made.append(Entry("rtn", recipe_of("rtn", **rows, static=rule)))
        made.append(Entry("smoothquant", recipe_of("smoothquant", static=rule)))
        others = Step(method="rtn", **rows, static=rule, layers=NOT_DOWN)
        made.append(Entry("rtn, down per token", Recipe((Step(method="rtn", **rows), others))))
    return made


def _named(bits: int) -> list[Entry]:
    """Methods that have one width, and SpQR, whose groups are its own."""
    made = [Entry("spqr", recipe_of("spqr", bits=bits))] if bits <= 4 else []
    if bits == 4:
        return [
            *made,
            Entry("gptq", recipe_of("gptq", bits=4, group=32, symmetric=True)),
            Entry("nf4", recipe_of("nf4")),
            Entry("nf4", recipe_of("nf4"), "bitsandbytes"),
            *(Entry(kind, recipe_of(kind), package) for kind in ("mxfp4", "nvfp4") for package in (None, "torchao")),
        ]
    if bits == 8:
        rows = recipe_of("rtn", bits=8, group=0, symmetric=True)
        return [
            Entry("int8", rows),
            Entry("int8", rows, "bitsandbytes"),
            Entry("int8", rows, "torchao"),
            Entry("llm.int8", recipe_of("llm.int8")),
            Entry("llm.int8", recipe_of("llm.int8"), "bitsandbytes"),
            Entry("fp8", recipe_of("fp8", activations="fp8")),
            Entry("fp8", recipe_of("fp8")),
            Entry("fp8", recipe_of("fp8"), "torchao"),
        ]
    return made


def _blocks(bits: int) -> list[Entry]:
    """GGUF mixtures of a width, ours and llama.cpp's, with an importance matrix where that changes anything."""
    made = []
    for mixture, width in MIXTURES.items():
        if width == bits:
            recipe = recipe_of("rtn", bits=width, group=32, symmetric=False)
            for package in (None, "llama.cpp"):
                made.append(Entry("gguf", recipe, package, mixture, importance=mixture != "q8_0"))
            made.append(Entry(GGUF_FEEDBACK, recipe, None, mixture, importance=mixture != "q8_0"))
    return made
