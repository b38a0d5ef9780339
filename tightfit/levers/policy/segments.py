"""Whose allocator has segments that grow: processes with pieces of long rows.

Their tensors are so large, and of so many sizes, that blocks of fixed segments are seldom the right one for the next:
rows of 3.7 million tokens of an 8B model over eight ranks have 61 GiB in use, and fixed segments hold 88 GiB for them,
more than an H100 has; segments that grow hold 73, and on a full card give back the pages that nobody uses. Others keep
torch's default, under which their memory was measured. A setting in the environment goes first.
"""

from tightfit.jobs.layout import Layout

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""With which users choose by themselves; the second is its older name."""
SETTING = "expandable_segments:True"


def grows_segments(layout: Layout) -> bool:
    """Whether runs of `layout` have segments that grow, unless told otherwise."""
    return layout.context > 1
