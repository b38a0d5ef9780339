"""Wall-clock seconds of a call."""

import time
from collections.abc import Callable


def seconds_each(run: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each of `rounds` calls, after one warm-up call."""
    run()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return seconds
