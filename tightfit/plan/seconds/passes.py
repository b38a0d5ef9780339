"""PassSeconds: what takes time in the forward and in the backward pass of a micro-batch."""

from typing import NamedTuple


class PassSeconds(NamedTuple):
    """Seconds of forward and of backward."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def both_s(self) -> float:
        """Of the two together."""
        return self.forward_s + self.backward_s
