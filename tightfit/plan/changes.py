"""Changes: what would make a plan fit that does not, the smallest step of each kind.

Each is tried by looking for one layout that fits with every lever pulled, so the answer is what the search itself would
find: a pin let go, fewer tokens per row, more cards, another card, more host memory, narrower optimizer states.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tightfit.hardware.catalog import CATALOG
from tightfit.hardware.links import LINKS
from tightfit.hardware.machine import DEFAULT_NETWORK, Machine
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.training import peak
from tightfit.plan.space import Space

MOST_RANKS = 16_384
LEAST_TOKENS = 128


@dataclass(frozen=True)
class Change:
    """One thing to change, and what it would be changed to."""

    what: str
    to: str

    def __str__(self) -> str:
        return f"{self.what}: {self.to}"


def changes(space: Space) -> list[Change]:
    """The smallest change of each kind after which something fits."""
    return list(_changes(space))


def _changes(space: Space) -> Iterator[Change]:
    for section in ("levers", "layout"):
        for name in getattr(space.pins, section):
            if some_fit(replace(space, pins=space.pins.without(section, name))):
                yield Change("let the planner choose", f"{section}.{name}")
    if space.machine.host_bytes is not None and some_fit(replace(space, machine=_any_host(space.machine))):
        yield Change("more host memory", f"than {space.machine.host_bytes / 1e9:.0f} GB a node, with offload")
    if not space.lossy and some_fit(replace(space, lossy=True)):
        yield Change("narrower optimizer states", "--allow-lossy")
    if tokens := _fewer_tokens(space):
        yield Change("shorter rows", f"--seq {tokens}")
    if machine := _more_cards(space):
        yield Change("more cards", machine.text)
    if machine := _other_card(space):
        yield Change("another card", machine.text)


def some_fit(space: Space) -> bool:
    """Whether any layout fits with all levers pulled."""
    return any(_fits(space, layout, levers) for layout, levers in _leanest(space))


def _leanest(space: Space) -> Iterator[tuple[Layout, Levers]]:
    """The leanest layouts with the strongest levers, and with the strongest that leave a small host alone."""
    pulled = space.levers()
    options = pulled[-1:]
    if space.machine.host_bytes is not None:
        options += [each for each in pulled if each.offload == "none"][-1:]
    for family in space.families():
        for layout in space.leanest(family):
            yield from ((layout, levers) for levers in options)


def _fits(space: Space, layout: Layout, levers: Levers) -> bool:
    gpu, host = peak(space.workload, layout, levers)
    node_host = host * min(space.machine.per_node, layout.ranks)
    room = space.machine.host_bytes
    return gpu <= space.machine.accelerator.memory_bytes and (room is None or node_host <= room)


def _any_host(machine: Machine) -> Machine:
    return replace(machine, host_bytes=None)


def _fewer_tokens(space: Space) -> int | None:
    length = space.workload.sequence_length // 2
    while length >= LEAST_TOKENS:
        if some_fit(replace(space, workload=_shorter(space.workload, length))):
            return length
        length //= 2
    return None


def _shorter(workload: Workload, length: int) -> Workload:
    return replace(workload, sequence_length=length)


def _more_cards(space: Space) -> Machine | None:
    """Twice the cards, again and again: inside the node up to eight, then more nodes."""
    machine = space.machine
    while machine.ranks * 2 <= MOST_RANKS:
        inside = machine.nodes == 1 and machine.per_node * 2 <= 8
        nodes, per_node = (1, machine.per_node * 2) if inside else (machine.nodes * 2, machine.per_node)
        machine = machine.with_counts(nodes, per_node)
        if some_fit(replace(space, machine=machine)):
            return machine
    return None


def _other_card(space: Space) -> Machine | None:
    """The smallest card that would do in the same number."""
    machine, here = space.machine, space.machine.accelerator.memory_bytes
    for card in sorted(CATALOG, key=lambda row: row.memory_bytes):
        if card.memory_bytes <= here or (space.workload.precision != "fp32" and card.rates.bf16 is None):
            continue
        counts = f"{machine.nodes}x{machine.per_node}x" if machine.nodes > 1 else f"{machine.per_node}x"
        other = replace(
            machine, accelerator=card, intra=card.peer, inter=LINKS[card.network or DEFAULT_NETWORK],
            text=f"{counts}{card.name}",
        )  # fmt: skip
        if some_fit(replace(space, machine=other)):
            return other
    return None
