"""How many tiles a layer needs so that one of them fits into the memory that is free.

A tile holds, at its fullest moment, `token_bytes` for each of its tokens (memory/formulas/tiles.py): three tensors of
the MLP's width and a few of the model's. Fewer tiles are faster, so the fewest that fit are taken. What does not shrink
with tiles (q, k, v, attention's output, the float32 sums of the weights' gradients) must be counted as used already.
"""

from tightfit.errors import UserError
from tightfit.memory.formulas.tiles import token_bytes
from tightfit.models.spec import ModelSpec


def tile_count(spec: ModelSpec, rows: int, length: int, element_bytes: int, free_bytes: int, tensor: int = 1) -> int:
    """The fewest tiles of `rows` sequences of `length` tokens of which one takes at most `free_bytes`."""
    step_bytes = rows * token_bytes(spec, element_bytes, tensor)
    longest = free_bytes // step_bytes
    if longest < 1:
        raise UserError(
            f"{free_bytes} bytes are free, but a tile of one token in each of {rows} rows takes {step_bytes}; "
            "free more memory or lower layout.micro_batch"
        )
    return -(-length // min(longest, length))
