"""A rank that does nothing, in a module that imports nothing."""

import time


def sleep(rank: int) -> None:
    """Until somebody ends it."""
    time.sleep(600)
