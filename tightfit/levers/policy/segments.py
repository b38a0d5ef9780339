"""Which runs use expandable segments of torch's CUDA allocator: those with context parallelism, so long rows.

Their tensors are so large, and of so many sizes, that a freed block of a fixed segment seldom fits the next tensor:
rows of 3.7 million tokens of an 8B model over eight ranks have 61 GiB allocated, for which fixed segments reserve
88 GiB, more than an H100 has; expandable segments reserve 73, and on a full card give back unused pages. Other runs
keep torch's default, under which their memory was measured. A setting in the environment goes first.
"""

from tightfit.jobs.layout import Layout

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that set the allocator; a user's setting is left alone. The second is the older name."""
SETTING = "expandable_segments:True"


def uses_expandable_segments(layout: Layout) -> bool:
    """Whether runs of `layout` use expandable segments, unless the environment sets the allocator."""
    return layout.context > 1
