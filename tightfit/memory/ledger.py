"""Ledger: bytes at the peak of each phase, by component and place.

Formulas, simulation and measurement fill the same type, so a prediction and a measurement can be compared line by line.
A line says: at the peak of `phase` on `rank`, `component` held `bytes` in `place`. The lines of one phase, rank and
place therefore add up to that phase's peak, and the largest phase is the run's peak.

Three components are not tensors: `workspace` is kernels' temporary memory, `allocator slack` is memory that PyTorch's
caching allocator has reserved but not allocated, `cuda context` is the driver's. The last two are not allocated.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from tightfit.errors import UserError

Component = Literal[
    "weights",
    "master weights",
    "gradients",
    "optimizer states",
    "key/value cache",
    "activations",
    "logits and loss",
    "inputs",
    "communication",
    "workspace",
    "allocator slack",
    "cuda context",
]
Phase = Literal[
    "load", "init", "first step", "forward", "loss", "backward", "optimizer", "evaluation", "save", "resume", "coding"
]
Place = Literal["gpu", "host"]
Source = Literal["formulas", "simulation", "measurement"]
COMPONENTS: tuple[Component, ...] = get_args(Component)
PHASES: tuple[Phase, ...] = get_args(Phase)
NOT_ALLOCATED: tuple[Component, ...] = ("allocator slack", "cuda context")


@dataclass(frozen=True, kw_only=True)
class Line:
    """`bytes` of `component` at the peak of `phase`; `detail` is the kind, `why` the reason or formula."""

    component: Component
    phase: Phase
    bytes: int
    place: Place = "gpu"
    detail: str = ""
    why: str = ""
    rank: int = 0


@dataclass(frozen=True)
class Ledger:
    """Lines of one run from one source."""

    source: Source
    lines: tuple[Line, ...]

    def total(self, keep: Callable[[Line], bool]) -> int:
        """Bytes of all lines that `keep` accepts."""
        return sum(line.bytes for line in self.lines if keep(line))

    def moments(self, place: Place = "gpu") -> list[tuple[Phase, int]]:
        """Every (phase, rank) that has lines in `place`, in the order of the phases."""
        found = {(line.phase, line.rank) for line in self.lines if line.place == place}
        return sorted(found, key=lambda moment: (PHASES.index(moment[0]), moment[1]))

    def at(self, phase: Phase, rank: int = 0, place: Place = "gpu") -> tuple[Line, ...]:
        """The lines of one phase, rank and place."""
        wanted = (phase, rank, place)
        return tuple(line for line in self.lines if (line.phase, line.rank, line.place) == wanted)

    def allocated_bytes(self, phase: Phase, rank: int = 0, place: Place = "gpu") -> int:
        """Bytes of tensors and workspaces at the peak of `phase`."""
        return sum(line.bytes for line in self.at(phase, rank, place) if line.component not in NOT_ALLOCATED)

    def fullest(self, place: Place = "gpu") -> tuple[Phase, int]:
        """The (phase, rank) where most was allocated."""
        moments = self.moments(place)
        if not moments:
            raise UserError(f"the ledger has no line for the {place}")
        return max(moments, key=lambda moment: self.allocated_bytes(moment[0], moment[1], place))

    def peak_allocated_bytes(self, place: Place = "gpu") -> int:
        """The most that was allocated at once on any rank."""
        return max((self.allocated_bytes(*moment, place) for moment in self.moments(place)), default=0)

    def peak_reserved_bytes(self, place: Place = "gpu") -> int:
        """The most that the allocator had reserved at once."""
        return max((self._held(*moment, place, ("cuda context",)) for moment in self.moments(place)), default=0)

    def peak_bytes(self, place: Place = "gpu") -> int:
        """The most device memory in use: reserved memory and the CUDA context."""
        return max((self._held(*moment, place, ()) for moment in self.moments(place)), default=0)

    def _held(self, phase: Phase, rank: int, place: Place, without: tuple[Component, ...]) -> int:
        return sum(line.bytes for line in self.at(phase, rank, place) if line.component not in without)

    def by_component(self, phase: Phase, rank: int = 0, place: Place = "gpu") -> dict[Component, int]:
        """Bytes of each component at the peak of a phase, in the order of COMPONENTS."""
        found: dict[Component, int] = {}
        for component in COMPONENTS:
            held = sum(line.bytes for line in self.at(phase, rank, place) if line.component == component)
            if held:
                found[component] = held
        return found

    def with_lines(self, lines: Iterable[Line]) -> "Ledger":
        """The same ledger with more lines."""
        return replace(self, lines=(*self.lines, *lines))

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"source": self.source, "lines": [asdict(line) for line in self.lines]}

    @classmethod
    def from_json(cls, data: Any, where: str) -> "Ledger":
        """The ledger from `to_json`'s data; a UserError for anything else names `where` it came from."""
        try:
            if data["source"] not in get_args(Source):
                raise ValueError(f"source {data['source']!r}")
            return cls(data["source"], tuple(_lines(data["lines"])))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{where} is not a ledger ({error}); make one with `tightfit plan --save`") from None


def _lines(rows: Iterable[dict[str, Any]]) -> Iterator[Line]:
    for row in rows:
        line = Line(**row)
        known = line.component in COMPONENTS and line.phase in PHASES and line.place in get_args(Place)
        if not known or type(line.bytes) is not int or type(line.rank) is not int:
            raise ValueError(f"line {row}")
        yield line
