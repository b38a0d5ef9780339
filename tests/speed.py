"""Processor time in a unit that every machine has: a million turns of a loop in Python.

A bound in seconds is a statement about one processor, and one in seconds of the clock about all that runs beside. Here
what a test does is counted in turns of a loop that is timed in the same process, and what a program does in starts of a
bare interpreter; both are processor time, which a busy machine does not lengthen.
"""

import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

TURNS = 1_000_000


@cache
def million_turns_s() -> float:
    """Of processor time, once for all in this process."""
    return _turns_now_s()


def _turns_now_s() -> float:
    """The fastest of five loops, as the first ones may find cold caches; a trace would slow them."""
    assert not tracemalloc.is_tracing()
    return min(_timed_loop() for _ in range(5))


def _timed_loop() -> float:
    began, number = time.process_time(), 0
    for turn in range(TURNS):
        number += turn
    return time.process_time() - began


@contextmanager
def within_turns(millions: float) -> Iterator[None]:
    """What is done inside takes no more processor time than so many million turns.

    What seems too slow is judged by a loop timed right after it: a core whose other thread is busy meanwhile needs more
    processor time for anything.
    """
    turns_s, began = million_turns_s(), time.process_time()
    yield
    took_s = time.process_time() - began
    if took_s >= millions * turns_s:
        turns_s = max(turns_s, _turns_now_s())
    took = took_s / turns_s
    assert took < millions, f"took {took:.0f} million turns of a loop, {millions:g} are allowed"


def program_s(*command: str, attempts: int = 2) -> float:
    """Processor time of a program and all it waits for: the least of some attempts."""
    return min(_timed_program(command) for _ in range(attempts))


def _timed_program(command: tuple[str, ...]) -> float:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as program:
        _, status, used = os.wait4(program.pid, 0)
        program.returncode = os.waitstatus_to_exitcode(status)
    assert program.returncode == 0, command
    return used.ru_utime + used.ru_stime


def python_s(*arguments: str) -> float:
    """Processor time of this interpreter with these arguments."""
    return program_s(sys.executable, *arguments)
