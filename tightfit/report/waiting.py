"""A message on stderr while work takes longer than a few seconds: what it is, and the seconds so far."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 3.0
"""Work that takes less prints nothing."""
TICK_S = 1.0


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Context for work that may take long: a line that counts seconds on a terminal, a single line elsewhere."""
    done = threading.Event()
    teller = threading.Thread(target=_tell, args=(what, done), daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _tell(what: str, done: threading.Event) -> None:
    began = time.monotonic()
    if done.wait(PATIENCE_S):
        return
    if not sys.stderr.isatty():
        print(f"tightfit: {what} …", file=sys.stderr, flush=True)
        return
    while True:
        print(f"\r{what} … {time.monotonic() - began:.0f} s", end="", file=sys.stderr, flush=True)
        if done.wait(TICK_S):
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            return
