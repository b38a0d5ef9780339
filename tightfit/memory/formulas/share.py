"""The names that `local_shape` had before."""

from tightfit.memory.formulas.local_shape import LocalShape as Share
from tightfit.memory.formulas.local_shape import local_shape as share_of

__all__ = ["Share", "share_of"]
