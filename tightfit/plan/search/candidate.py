"""Candidate: a layout with levers, its memory and the time of its step."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from tightfit.errors import UserError
from tightfit.hardware.machine import Machine
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.saving import writers_of_node
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.overheads import Overheads
from tightfit.memory.formulas.training import Peaks, least_peaks, peaks
from tightfit.plan.cost import Costs, states_key
from tightfit.plan.search.lever_choices import NO_LEVERS, states_on_host, without_gains
from tightfit.plan.search.space import SearchSpace
from tightfit.plan.steptime import StepTime


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout with levers, priced: its time and its memory; bytes of the host are one node's."""

    layout: Layout
    levers: Levers
    costs: Costs
    gpu_bytes: int
    host_bytes: int
    """Of a node's host between checkpoints."""
    saving_bytes: int
    """Further bytes of a node's host, to which ranks copy a checkpoint before it is written."""

    @cached_property
    def time(self) -> StepTime:
        """The step's time, computed on first use."""
        return self.costs.step(self.layout, self.levers)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.time.step_s

    @property
    def host_peak_bytes(self) -> int:
        """Bytes of a node's host while a checkpoint is written."""
        return self.host_bytes + self.saving_bytes

    def shortage_bytes(self, machine: Machine, share: float = 1.0) -> int:
        """Bytes that a node's cards, of which `share` may be used, and its host lack together; a host of unknown size
        lacks nothing."""
        card = self.gpu_bytes - int(share * machine.accelerator.memory_bytes)
        host = 0 if machine.host_bytes is None else self.host_peak_bytes - machine.host_bytes
        return max(0, card) * min(machine.per_node, self.layout.ranks) + max(0, host)

    def fits(self, machine: Machine, share: float = 1.0) -> bool:
        """Whether card and host hold it."""
        return self.shortage_bytes(machine, share) == 0

    @property
    def complexity(self) -> tuple[int, int, int]:
        """How much there is to get wrong: degrees above one, levers pulled, and the ZeRO stage."""
        layout, levers = self.layout, self.levers
        pulled = sum(getattr(levers, name) != getattr(NO_LEVERS, name) for name in Levers.model_fields)
        return len(layout.splits) + (layout.tensor_mesh != "1d"), pulled, layout.zero


@lru_cache(maxsize=16)
def _known_least_peaks(workload: Workload, overheads: Overheads) -> dict[tuple[object, ...], Peaks]:
    """A cache for `Pricing._least_peaks`: one for all cards, pins and numbers of cards that changes.py tries."""
    return {}


class Pricing:
    """Candidates of one workload on one machine, each computed once, and cheaper lower bounds of their memory."""

    def __init__(self, space: SearchSpace) -> None:
        self.space, self.costs = space, Costs(space.workload, space.machine)
        self.overheads = space.overheads
        self._candidates: dict[tuple[Layout, Levers], Candidate] = {}
        self._least = _known_least_peaks(space.workload, space.overheads)
        self._rank_bytes: dict[tuple[Layout, Levers], int] = {}
        """Bytes of the first pipeline rank that was found not to fit."""

    def candidate(self, layout: Layout, levers: Levers) -> Candidate:
        """The candidate of a layout with levers."""
        if (layout, levers) not in self._candidates:
            needed = peaks(self.space.workload, layout, levers, self.overheads)
            self._candidates[layout, levers] = self._candidate(layout, levers, needed)
        return self._candidates[layout, levers]

    def ranking_s(self, layout: Layout, levers: Levers) -> float:
        """Seconds of a step by which sets of levers are ranked: levers for memory alone are not credited with time."""
        return max(self.costs.step(layout, each).step_s for each in {levers, without_gains(levers)})

    def fits(self, layout: Layout, levers: Levers, share: float = 1.0) -> bool:
        """Whether `share` of the card, and the host, hold a layout with levers."""
        key, room_bytes = (layout, levers), self._room_bytes(share)
        if key not in self._candidates:
            if not self.may_fit(layout, levers, share) or self._rank_bytes.get(key, 0) > room_bytes:
                return False
            needed = peaks(self.space.workload, layout, levers, self.overheads, room_bytes=room_bytes)
            if needed.gpu_bytes > room_bytes:
                self._rank_bytes[key] = needed.gpu_bytes
                return False
            self._candidates[key] = self._candidate(layout, levers, needed)
        return self._candidates[key].fits(self.space.machine, share)

    def may_fit(self, layout: Layout, levers: Levers, share: float) -> bool:
        """Whether states and gradients alone fit on the card and the host."""
        return self.card_may_hold(layout, levers, share) and self.least(layout, levers).fits(self.space.machine, share)

    def card_may_hold(self, layout: Layout, levers: Levers, share: float = 1.0) -> bool:
        """Whether states and gradients alone fit on the card."""
        return self._least_peaks(layout, levers).gpu_bytes <= self._room_bytes(share)

    def least(self, layout: Layout, levers: Levers) -> Candidate:
        """A candidate with lower bounds of memory: states, gradients, and the host's copy for a checkpoint."""
        return self._candidate(layout, levers, self._least_peaks(layout, levers))

    def _least_peaks(self, layout: Layout, levers: Levers) -> Peaks:
        """Peaks without activations: the same for many micro-batches, schedules and levers."""
        key = (states_key(layout), states_on_host(levers), levers.offload_keep_bytes, levers.update_in_backward)
        if key not in self._least:
            self._least[key] = least_peaks(self.space.workload, layout, levers, self.overheads)
        return self._least[key]

    def _room_bytes(self, share: float) -> int:
        return int(share * self.space.machine.accelerator.memory_bytes)

    def _candidate(self, layout: Layout, levers: Levers, needed: Peaks) -> Candidate:
        """A candidate that needs `needed` per rank; nothing is copied to the host where it has no memory of its own."""
        machine = self.space.machine
        ranks_here = min(machine.per_node, layout.ranks)
        writers = 0 if machine.host_bytes == 0 else writers_of_node(layout, ranks_here)
        return Candidate(
            layout=layout,
            levers=levers,
            costs=self.costs,
            gpu_bytes=needed.gpu_bytes,
            host_bytes=needed.host_bytes * ranks_here,
            saving_bytes=writers * needed.saved_bytes,
        )

    def within_budget(self, families: list[list[Layout]]) -> list[list[Layout]]:
        """The layouts for which a pinned budget of activations is large enough; a UserError if it is for none."""
        if self.space.pins.levers.get("checkpoint_budget_bytes") is None:
            return families
        refusals = {layout: self._refusal(layout) for family in families for layout in family}
        kept = [[layout for layout in family if refusals[layout] is None] for family in families]
        if not any(kept):
            raise UserError(next(filter(None, refusals.values()), ""))
        return kept

    def _refusal(self, layout: Layout) -> str | None:
        try:
            self.candidate(layout, self.space.levers_of(layout)[0])
        except UserError as error:
            return str(error)
        return None
