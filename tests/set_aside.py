"""What the garbage collector has been told to leave alone stays so when a run has ended.

A run sets aside what is there before its first step, and has all of it looked at again after its last one
(train/short_collections.py). A process that tests many runs has set aside what it imported (tests/conftest.py, the
server of forked processes): after the first of them every full collection would go over a million objects, a third of a
second each, and in a forked process write to all the pages that it shares.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def looks_again_at_nothing(device: torch.device) -> Iterator[None]:
    """In place of `short_collections`."""
    yield


def keep_set_aside() -> None:
    """From now on, in this process."""
    from tightfit.prove import rates
    from tightfit.train import loop

    for module in (loop, rates):
        setattr(module, "short_collections", looks_again_at_nothing)  # noqa: B010
