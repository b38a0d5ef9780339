"""The data ranks that write a checkpoint hold all of it between them."""

from itertools import product

from tightfit.jobs.layout import Layout
from tightfit.jobs.saving import shard_holders


def test_replicas_that_write_hold_every_expert() -> None:
    """Of neighbouring data and context ranks each holds the next experts: the first data ranks with all of them."""
    for data, context, expert in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8)):
        if data * context % expert:
            continue
        held = [{(rank * context + piece) % expert for piece in range(context)} for rank in range(data)]
        enough = next(count for count in range(1, data + 1) if len(set().union(*held[:count])) == expert)
        assert shard_holders(Layout(data=data, context=context, expert=expert)) == enough
