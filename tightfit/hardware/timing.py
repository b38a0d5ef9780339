"""Seconds of a call on this machine, by the clock."""

import time
from collections.abc import Callable


def seconds_each(run: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each of `rounds` calls, after one that makes what is made on first use."""
    run()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return seconds
