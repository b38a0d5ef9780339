"""Cases in children that do no harm to their parent, several children beside each other.

A lane is a share of the cases and the child that runs them one after another. A child that says nothing for too long
is killed, one that dies is noted, and another takes over behind the case.
"""

import json
import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from tests.fuzz.containment import MILLION_TURNS, SLACK, STOPPED, Make, run_in_child
from tests.fuzz.materials import Materials
from tests.speed import million_turns_s


@dataclass(frozen=True)
class Outcome:
    """A case that was run, and what it did beside succeeding or being refused (nothing, as a rule)."""

    number: int
    kind: str
    what: str


@dataclass
class Lane:
    """Cases that wait, the child that runs them, and when it was last heard of."""

    waiting: list[int]
    child: int = 0
    pipe: int = -1
    rest: bytes = b""
    heard: float = 0.0

    def start(self, run: Callable[..., NoReturn]) -> None:
        """A child for all that waits."""
        self.pipe, write = os.pipe()
        self.rest, self.heard = b"", time.monotonic()
        self.child = os.fork()
        if self.child == 0:
            os.close(self.pipe)
            run(self.waiting, pipe=write)
        os.close(write)

    def read(self) -> Iterator[tuple[int, str]]:
        """The cases the child is through with since it was last asked; last the one that ended it, if one did."""
        block = os.read(self.pipe, 65536)
        *lines, self.rest = (self.rest + block).split(b"\n")
        self.heard = time.monotonic()
        for number, what in map(json.loads, lines):
            self.waiting.remove(number)
            yield number, what
        if not block:
            code = self.end()
            if code == STOPPED:
                self.waiting.clear()
            elif self.waiting:
                yield self.waiting.pop(0), f"ends the process ({code})"

    def kill(self) -> Iterator[tuple[int, str]]:
        """The case that hangs."""
        os.kill(self.child, signal.SIGKILL)
        self.end()
        yield self.waiting.pop(0), "hangs"

    def end(self) -> int:
        """The exit code of a child that has ended."""
        os.close(self.pipe)
        status = os.waitpid(self.child, 0)[1]
        self.child = 0
        return os.waitstatus_to_exitcode(status)


def run_cases(
    kinds: dict[str, Make],
    numbers: Sequence[int],
    seed: int,
    given: Materials,
    *,
    jobs: int = 1,
    deadline: float = math.inf,
) -> Iterator[Outcome]:
    """Run the cases of these numbers, which take the kinds in turn, in `jobs` children; outcomes come as they are made.

    A lane takes whole rounds of kinds, so that none is left with the slow ones. Past the deadline (of
    `time.monotonic`) no case is begun.
    """
    names = list(kinds)
    rounds = [[number for number in numbers if number // len(names) % jobs == index] for index in range(jobs)]
    lanes = [Lane(waiting) for waiting in rounds]
    run = partial(run_in_child, kinds, seed=seed, given=given, deadline=deadline)
    while lanes := [lane for lane in lanes if lane.waiting or lane.child]:
        for lane in lanes:
            if not lane.child:
                lane.start(run)
        for number, what in _news(lanes):
            yield Outcome(number, names[number % len(names)], what)


def _news(lanes: list[Lane]) -> Iterator[tuple[int, str]]:
    """What the children say next; a child that has been silent for too long is killed."""
    longest_s = MILLION_TURNS * million_turns_s() * SLACK
    wait_s = min(lane.heard for lane in lanes) + longest_s - time.monotonic()
    speaking = select.select([lane.pipe for lane in lanes], [], [], max(wait_s, 0))[0]
    for lane in lanes:
        if lane.pipe in speaking:
            yield from lane.read()
        elif time.monotonic() - lane.heard > longest_s:
            yield from lane.kill()
