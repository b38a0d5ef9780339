"""Which ranks write shards of a checkpoint: how many per node bounds the host memory of saving. Without torch."""

from tightfit.jobs.layout import Layout


def shard_holders(layout: Layout) -> int:
    """Data ranks with different shards of the states: under DDP those that hold all experts between them with their
    context ranks, or 1; a ZeRO group under hybrid sharding; else all."""
    if not layout.zero:
        return -(-layout.expert * layout.data // layout.gradient_ranks)
    return layout.shard_inside or layout.data


def writers_of_node(layout: Layout, ranks_here: int) -> int:
    """The most ranks of one node that write a shard of a checkpoint."""
    writers = layout.ranks // layout.data * shard_holders(layout)
    return min(ranks_here, writers)
