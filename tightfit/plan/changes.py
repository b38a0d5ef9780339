"""Changes: what would make a plan fit that does not, the smallest step of each kind.

Each is tried by looking for one layout that fits with the strongest levers, so the answer is what the search itself
would find: a pin let go, more host memory, narrower optimizer states, shorter rows, more cards, another card. Where the
host's memory is not known and a change needs it, it says how much.
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
from tightfit.plan.lever_choices import strongest_of_groups
from tightfit.plan.seconds.rates import NUMBERS
from tightfit.plan.space import SearchSpace

MOST_RANKS = 16_384
LEAST_TOKENS = 128


@dataclass(frozen=True)
class Change:
    """One thing to change, and what it would be changed to."""

    what: str
    to: str

    def __str__(self) -> str:
        return f"{self.what}: {self.to}"


def changes(space: SearchSpace) -> list[Change]:
    """The smallest change of each kind after which something fits."""
    return list(_changes(space))


def _changes(space: SearchSpace) -> Iterator[Change]:
    for section in ("levers", "layout"):
        for name in getattr(space.pins, section):
            if (need := least_host(replace(space, pins=space.pins.without(section, name)))) is not None:
                yield Change("let the planner choose", f"{section}.{name}{_with_host(space, need)}")
    if space.machine.host_bytes is not None and (need := least_host(replace(space, machine=_any_host(space.machine)))):
        yield Change("more host memory", f"{need / 1e9:.0f} GB a node, with offload")
    if not space.lossy and (need := least_host(replace(space, lossy=True))) is not None:
        yield Change("narrower optimizer states", f"--allow-lossy{_with_host(space, need)}")
    for what, found in (("shorter rows", _fewer_tokens), ("more cards", _more_cards), ("another card", _other_card)):
        if change := found(space):
            yield Change(what, change[0] + _with_host(space, change[1]))


def _with_host(space: SearchSpace, need_bytes: int) -> str:
    if space.machine.host_bytes is not None or need_bytes < 2**30:
        return ""
    return f" (and {need_bytes / 2**30:.0f} GiB of host memory a node)"


def least_host(space: SearchSpace) -> int | None:
    """Host bytes of a node with which some layout fits, the fewest that were found; None where nothing fits.

    Levers that leave the host alone are tried first.
    """
    for levers in strongest_of_groups(space.levers()).values():
        needs = (_host_need(space, layout, levers) for family in space.families() for layout in space.leanest(family))
        if (least := min((need for need in needs if need is not None), default=None)) is not None:
            return least
    return None


def _host_need(space: SearchSpace, layout: Layout, levers: Levers) -> int | None:
    """Host bytes of a node if this fits, else None."""
    gpu, host = peak(space.workload, layout, levers)
    node_host = host * min(space.machine.per_node, layout.ranks)
    room = space.machine.host_bytes
    fits = gpu <= space.machine.accelerator.memory_bytes and (room is None or node_host <= room)
    return node_host if fits else None


def _any_host(machine: Machine) -> Machine:
    return replace(machine, host_bytes=None)


def _fewer_tokens(space: SearchSpace) -> tuple[str, int] | None:
    length = space.workload.sequence_length // 2
    while length >= LEAST_TOKENS:
        if (need := least_host(replace(space, workload=_shorter(space.workload, length)))) is not None:
            return f"--seq {length}", need
        length //= 2
    return None


def _shorter(workload: Workload, length: int) -> Workload:
    return replace(workload, sequence_length=length)


def _more_cards(space: SearchSpace) -> tuple[str, int] | None:
    """Twice the cards, again and again: inside the node up to eight, then more nodes."""
    machine = space.machine
    while machine.ranks * 2 <= MOST_RANKS:
        inside = machine.nodes == 1 and machine.per_node * 2 <= 8
        nodes, per_node = (1, machine.per_node * 2) if inside else (machine.nodes * 2, machine.per_node)
        machine = machine.with_counts(nodes, per_node)
        if (need := least_host(replace(space, machine=machine))) is not None:
            return machine.text, need
    return None


def _other_card(space: SearchSpace) -> tuple[str, int] | None:
    """The smallest card of the same vendor that would do in the same number; no chips that are whole computers."""
    machine, mine = space.machine, space.machine.accelerator
    same = (card for card in CATALOG if card.vendor == mine.vendor and card.form not in ("superchip", "soc"))
    for card in sorted(same, key=lambda row: row.memory_bytes):
        if card.memory_bytes <= mine.memory_bytes or card.rates.of(NUMBERS[space.workload.precision]) is None:
            continue
        counts = f"{machine.nodes}x{machine.per_node}x" if machine.nodes > 1 else f"{machine.per_node}x"
        other = replace(
            machine, accelerator=card, intra=card.peer, inter=LINKS[card.network or DEFAULT_NETWORK],
            text=f"{counts}{card.name}",
        )  # fmt: skip
        if (need := least_host(replace(space, machine=other))) is not None:
            return other.text, need
    return None
