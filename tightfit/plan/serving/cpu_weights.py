"""How an engine on a CPU holds weights: in a format (`CpuFormat`), or of a compressed model, by its files' headers.

| matrix | in memory |
|---|---|
| 4-bit integers that the CPU has a product for; of layers with one input, all or none | codes, and scales twice |
| with inputs that are rounded, or an adapter beside it | codes |
| other codes, and experts | float32 where all together are many and there is room, else codes |
| plain | float32 |

Projections of the common kind are joined. Where all of a model's can be, plain ones have a copy in 16 bits besides,
unless that would change what they are. serve/weights/cpu_codes.py and serve/weights/half.py do so; a quarter of free
memory is the room for either. Here it is a quarter of all memory: a plan does not depend on what else runs just now,
and what is free once the weights are there depends on how they are held.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from tightfit.hardware.cpu_rates import CpuRates, ReadAs
from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.memory.formulas.serving import WeightFormat
from tightfit.models.quantized.held_weights import PLAIN_BYTES, CodedModule, HeldWeights, Matrix
from tightfit.models.quantized.matrices import HEAD, codable
from tightfit.models.quantized.scheme import CPU_SCALE_BYTES
from tightfit.models.spec import ModelSpec
from tightfit.plan.serving.cpu_operations import runs_joint
from tightfit.plan.serving.step import layer_params

HOST_SHARE = 0.25
"""Of free memory, what expanded weights, a copy in 16 bits, or the cache may take."""
FEWEST_EXPANDED = 2**20
"""Elements in all such layers from which on dequantizing them once is worth it."""
FEWEST_COPIED = 2**18
"""Elements from which half the bytes are worth a call of some 30 µs instead of 4."""
JOINED_ROWS = 16
"""Packed matrices of several layers are joined where their outputs are whole multiples of it."""
JOINED = (("attention.q", "attention.k", "attention.v"), ("attention.o",), ("mlp.gate", "mlp.up"), ("mlp.down",))
"""The projections of a layer, those of one input together."""

PACKED: tuple[WeightFormat, ...] = ("q4_0", "q4_1")
"""Formats of 4-bit integers, which a CPU kernel can read packed (kernels/quantized/int4_linear.py)."""


@dataclass(frozen=True)
class CpuWeights:
    """Weights of `held` on a CPU that has `products` with some formats, and `room_bytes` for what is optional."""

    held: HeldWeights
    spec: ModelSpec
    products: Collection[ReadAs]
    room_bytes: float

    @cached_property
    def held_bytes(self) -> int:
        """Bytes of all weights, without copies."""
        packed_scales = sum(
            CPU_SCALE_BYTES * each.outputs * module.scheme.groups(each.inputs)
            for module in self._packed
            for each in module.matrices
        )
        codes = sum(module.bytes for module in self.held.modules if module not in self._expanded)
        return codes + packed_scales + FLOAT32_BYTES * (self._plain_elements + _elements(self._expanded))

    @cached_property
    def copied_bytes(self) -> int:
        """Bytes of the copy in 16 bits; 0 without one."""
        size = sum(2 * _size(group) for group in self._copied)
        return size if size <= self.room_bytes else 0

    @cached_property
    def _copied(self) -> list[list[Matrix]]:
        """Projections that have a copy in 16 bits, where there is room."""
        has_products = "fp16" in self.products and self._is_joined
        return [group for group in self._groups if self._is_copied(group)] if has_products else []

    @property
    def layers_as(self) -> ReadAs:
        """The format in which products read most weights of the layers."""
        layers = [module for module in self.held.modules if not _is_head(module)]
        if 2 * _elements([module for module in layers if module in self._packed]) > _elements(layers):
            return "int4"
        copies = [group for group in self._copied if group[0].name != HEAD]
        return "fp16" if self.copied_bytes and copies else "fp32"

    @property
    def head_as(self) -> ReadAs:
        """The format in which products read the output projection."""
        if any(map(_is_head, self._packed)):
            return "int4"
        is_copied = any(group[0].name == HEAD for group in self._copied)
        return "fp16" if self.copied_bytes and is_copied else "fp32"

    @property
    def _plain_elements(self) -> int:
        """Weights that are not quantized; those of a GGUF file, whose matrices are not known, are all dequantized."""
        if self.held.coded_bytes and not self.held.modules:
            return self.spec.params()
        return self.held.plain_bytes // PLAIN_BYTES

    @cached_property
    def _packed(self) -> frozenset[CodedModule]:
        """Modules that are multiplied by as they are packed."""
        if "int4" not in self.products:
            return frozenset()
        alike: dict[tuple[str, int], list[CodedModule]] = defaultdict(list)
        for module in self.held.modules:
            for matrix in module.matrices:
                alike[matrix.name.rpartition(".")[0], matrix.inputs].append(module)
        found = [module for modules in alike.values() if all(map(_is_read, modules)) for module in modules]
        return frozenset(found)

    @cached_property
    def _expanded(self) -> frozenset[CodedModule]:
        """Modules that are dequantized once."""
        found = {
            module
            for module in self.held.modules
            if module.matrices
            and module not in self._packed
            and module.scheme.activations is None
            and not any(matrix.name in self.held.adapted for matrix in module.matrices)
        }
        fits = FEWEST_EXPANDED <= _elements(found) <= self.room_bytes / FLOAT32_BYTES
        return frozenset(found) if fits else frozenset()

    @cached_property
    def _groups(self) -> list[list[Matrix]]:
        """Matrices of one input, layer by layer, then the output projection; of models of the common kind."""
        shapes = codable(self.spec)
        names = [[f"layers.{i}.{name}" for name in group] for i in range(self.spec.layers) for group in JOINED]
        return [[Matrix(name, *shapes[name][1:]) for name in group] for group in [*names, [HEAD]]]

    @cached_property
    def _coded(self) -> dict[str, CodedModule]:
        """The module that a matrix is in codes of."""
        left = [module for module in self.held.modules if module not in self._expanded]
        return {matrix.name: module for module in left for matrix in module.matrices}

    @cached_property
    def _is_joined(self) -> bool:
        """Whether layers run over joined projections."""
        return runs_joint(self.spec) and not self.held.is_factored and all(map(self._can_be_one, self._groups))

    def _can_be_one(self, group: list[Matrix]) -> bool:
        """Whether projections of one input are all plain, or all in codes of a kind that has joined products."""
        modules = [self._coded.get(matrix.name) for matrix in group]
        found = [module for module in modules if module is not None]
        if len(found) < len(group):
            return not found
        if len({module.scheme for module in found}) > 1:
            return False
        is_packed = [module in self._packed for module in found]
        return all(is_packed) or (not any(is_packed) and _has_joined_product(group, found))

    def _is_copied(self, group: list[Matrix]) -> bool:
        """Whether there is a copy in 16 bits, room aside: plain weights that it does not change, or that are rounded
        beside it anyway."""
        is_plain = all(matrix.name not in self._coded for matrix in group)
        loses_nothing = not self.held.plain_is_wide or bool(self._packed or self._expanded)
        return is_plain and loses_nothing and _size(group) >= FEWEST_COPIED


@dataclass(frozen=True, kw_only=True)
class CpuFormat:
    """Weights of a model in one format; their own bytes follow from that (memory/formulas/serving.py)."""

    layers_as: ReadAs
    head_as: ReadAs
    copied_bytes: int
    held_bytes: None = None


def format_on_cpu(form: WeightFormat, spec: ModelSpec, measured: CpuRates) -> CpuFormat:
    """Products read 4-bit codes packed, float32 as it is, others from a 16-bit copy; each only if the CPU has such
    products, and copies only for joined layers."""
    plain = measured.nearest("fp32" if form == "fp32" or not runs_joint(spec) else "fp16")
    layers_as: ReadAs = "int4" if form in PACKED and "int4" in measured.products else plain
    copied_head = spec.vocabulary_params if plain == "fp16" else 0
    copied_layers = layer_params(spec) if layers_as == "fp16" else 0
    return CpuFormat(layers_as=layers_as, head_as=plain, copied_bytes=2 * (copied_head + copied_layers))


@lru_cache(maxsize=8)
def held_on_cpu(held: HeldWeights, spec: ModelSpec, products: frozenset[ReadAs], room_bytes: float) -> CpuWeights:
    """The `CpuWeights`, once for all that is asked of them: thousands of experts take a tenth of a second."""
    return CpuWeights(held, spec, products, room_bytes)


def _has_joined_product(group: list[Matrix], modules: list[CodedModule]) -> bool:
    """Whether serve/weights/joint.py multiplies by such codes, of one scheme, as by one matrix."""
    scheme = modules[0].scheme
    if scheme.kind == "fp8" or scheme.activations is not None:
        return scheme.activations in ("int8", "fp8") or (scheme.activations is None and scheme.group == 0)
    is_plain = scheme.kind == "int" and not scheme.outliers and scheme.group >= 0
    fits = len(group) == 1 or all(matrix.outputs % JOINED_ROWS == 0 for matrix in group)
    return is_plain and fits and all(module.is_ordered for module in modules)


def _is_read(module: CodedModule) -> bool:
    """Whether a CPU that has a product with 4-bit codes reads these; experts are dequantized as a stack."""
    return module.is_ordered and all(
        module.scheme.is_read_by_cpus(each.outputs, each.inputs) and ".experts." not in each.name
        for each in module.matrices
    )


def _is_head(module: CodedModule) -> bool:
    return any(matrix.name == HEAD for matrix in module.matrices)


def _elements(modules: Iterable[CodedModule]) -> int:
    return sum(module.elements for module in modules)


def _size(group: list[Matrix]) -> int:
    return sum(matrix.outputs * matrix.inputs for matrix in group)
