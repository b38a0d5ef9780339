"""Who writes what of a checkpoint, and what saving takes of a node's host memory, without torch."""

from tightfit.jobs.layout import Layout


def shard_holders(layout: Layout) -> int:
    """Data ranks that have different parts of a model's states: one under DDP, a group under hybrid sharding."""
    if not layout.zero:
        return 1
    return layout.shard_inside or layout.data


def writers_of_node(layout: Layout, ranks_here: int) -> int:
    """The most ranks of one node that write a part of a checkpoint each."""
    writers = layout.ranks // layout.data * shard_holders(layout)
    return min(ranks_here, writers)
