"""Two versions of a model's weights: micro-batches in flight keep that of their forward pass while a newer one exists.

A parameter is one tensor object, which modules, autograd and the optimizer hold; its storage is swapped. Autograd
saves a leaf itself, not its values, so the version of a micro-batch's forward pass must be in use again during its
backward pass. Autograd also counts in-place changes of the object, and would refuse that backward pass after an update
that wrote to the other version: updates are made under `updating`, which preserves the count.
Source: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-2BW).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

Version = list[Tensor]
"""The values of all parameters, in their order."""


class WeightVersions:
    """The newest weights and those of one update before; equal at first."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.newest: Version = [parameter.data for parameter in self.parameters]
        self.older: Version = [values.clone() for values in self.newest]
        self._in_use = self.newest

    def use(self, version: Version) -> None:
        """Compute with `version` from now on."""
        if version is not self._in_use:
            for parameter, values in zip(self.parameters, version, strict=True):
                parameter.data = values
            self._in_use = version

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, parameters are updated in place from the newest version to the next one, which is then the newest.

        No backward pass may need the older version any more: the new version takes its memory.
        """
        self.newest, self.older = self.older, self.newest
        with torch.no_grad():
            torch._foreach_copy_(self.newest, self.older)
        self.use(self.newest)
        with _unsafe_preserve_version_counter(tuple(self.parameters)):
            yield

    def named_older(self) -> Iterator[tuple[str, Tensor]]:
        """The older version by the parameters' names."""
        return zip(self.names, self.older, strict=True)
