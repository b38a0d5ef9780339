"""Python's garbage collector kept short while steps run.

A full collection looks at every object there is: with torch and transformers imported some 400 000, a tenth to a third
of a second in which nothing is launched. Recomputed layers leave cycles behind, so that it comes every ten steps or so.
Objects from before the first step are frozen (gc.freeze) and skipped: full collections then take a few milliseconds.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def short_collections(device: torch.device) -> Iterator[None]:
    """Inside the block, collections skip all objects from before it."""
    if device.type != "cpu":  # frozen garbage would keep its GPU memory
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
