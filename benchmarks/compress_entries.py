"""The rows of the table of compression quality: our methods at every width, and other packages' same methods."""

from dataclasses import dataclass

from tightfit.compress.cost import matrices, predict
from tightfit.compress.gguf_export import GgufCoder
from tightfit.compress.recipe import Recipe, recipe_of
from tightfit.models.spec import ModelSpec

WIDTHS = (8, 6, 5, 4, 3, 2)
GPTQMODEL_WIDTHS = (8, 4, 3, 2)
TORCHAO_WIDTHS = (8, 6, 5, 4, 3, 2)
HQQ_STATISTIC_BITS = 32
"""A scale and a zero point of 16 bits each, a group."""
MIXTURES = {"q8_0": 8, "q6_k": 6, "q5_k_m": 5, "q4_k_m": 4, "q4_0": 4}


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
        scheme = self.recipe.steps[-1].scheme()
        assert scheme is not None
        return scheme.bits

    def describe(self) -> str:
        """How numbers are coded."""
        if self.mixture is not None:
            return self.mixture + (", importance" if self.importance else "")
        scheme = self.recipe.steps[-1].scheme()
        assert scheme is not None
        return scheme.describe()

    def kind(self, name: str, spec: ModelSpec) -> str:
        """The GGUF type of a matrix."""
        assert self.mixture is not None
        _, outputs, inputs = matrices(spec)[name]
        return GgufCoder(spec, self.mixture).kind(f"{name}.weight", (outputs, inputs))

    def bits_per_weight(self, spec: ModelSpec) -> float:
        """Bits a weight of the coded matrices, scales and zero points included."""
        if self.mixture is not None:
            return self._block_bits(spec)
        scheme = self.recipe.steps[-1].scheme()
        assert scheme is not None
        if self.package == "hqq":
            return scheme.bits + HQQ_STATISTIC_BITS / scheme.group
        return predict(spec, self.recipe, 0, 0).bits_per_weight

    def _block_bits(self, spec: ModelSpec) -> float:
        import gguf

        bits = weights = 0.0
        for name, (count, outputs, inputs) in matrices(spec).items():
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.kind(name, spec)]]
            weights += count * outputs * inputs
            bits += count * outputs * inputs * 8 * block_bytes / block
        return bits / weights


def entries(group: int) -> list[Entry]:
    """Every method at every width in groups of `group` inputs, the widths that are read most first."""
    made: list[Entry] = []
    for bits in (4, 3, 2, 5, 6, 8):
        plain = recipe_of("gptq", bits=bits, group=group, symmetric=False, ranges="minmax")
        made += [
            Entry("gptq", recipe_of("gptq", bits=bits, group=group, symmetric=False)),
            Entry("gptq", plain, "llm-compressor"),
            Entry("hqq", recipe_of("rtn", bits=bits, group=group, symmetric=False), "hqq"),
            *([Entry("gptq", plain, "gptqmodel")] if bits in GPTQMODEL_WIDTHS else []),
            Entry("rtn", recipe_of("rtn", bits=bits, group=group, symmetric=False)),
            Entry("rtn", recipe_of("rtn", bits=bits, group=group, symmetric=False), "torchao"),
        ]
        made += _blocks(bits)
        made += _named(bits)
    for bits in (4, 3, 2):
        made += [Entry(name, recipe_of(name, bits=bits, group=group)) for name in ("awq", "rotate+gptq")]
    return [*made, Entry("smoothquant", recipe_of("smoothquant")), Entry("binary", recipe_of("binary", group=group))]


def _named(bits: int) -> list[Entry]:
    """Methods that have one width."""
    if bits == 4:
        return [
            Entry("nf4", recipe_of("nf4")),
            Entry("nf4", recipe_of("nf4"), "bitsandbytes"),
            Entry("mxfp4", recipe_of("mxfp4")),
            Entry("nvfp4", recipe_of("nvfp4")),
        ]
    if bits == 8:
        return [
            Entry("int8", recipe_of("rtn", bits=8, group=0, symmetric=True)),
            Entry("int8", recipe_of("rtn", bits=8, group=0, symmetric=True), "bitsandbytes"),
            Entry("int8", recipe_of("rtn", bits=8, group=0, symmetric=True), "torchao"),
            Entry("llm.int8", recipe_of("llm.int8")),
            Entry("fp8", recipe_of("fp8", activations="fp8")),
        ]
    return [Entry("spqr", recipe_of("spqr", bits=3))] if bits == 3 else []


def _blocks(bits: int) -> list[Entry]:
    """GGUF mixtures of a width, ours and llama.cpp's, with an importance matrix where that changes anything."""
    made = []
    for mixture, width in MIXTURES.items():
        if width == bits:
            recipe = recipe_of("rtn", bits=width, group=32, symmetric=False)
            for package in (None, "llama.cpp"):
                made.append(Entry("gguf", recipe, package, mixture, importance=mixture != "q8_0"))
    return made
