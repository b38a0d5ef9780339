"""Ranks: what a process of the data axis says to the others, apart from weights and gradients.

Alone (`ALONE`, the default everywhere) nothing is said and nothing is copied, so a single process pays nothing.
Every method that talks must be called by all ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Ranks:
    """This is rank `rank` of the `world` ranks of `group`."""

    rank: int = 0
    world: int = 1
    group: dist.ProcessGroup | None = None
    device_type: str = "cpu"
    """Where messages are: on the GPUs where the group talks between GPUs."""

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> "Ranks":
        """The ranks of the mesh's data axis."""
        if mesh is None:
            return ALONE
        return cls(mesh.get_local_rank("data"), mesh["data"].size(), mesh.get_group("data"), mesh.device_type)

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Added up over all ranks; alone, the tensor itself."""
        if self.world == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def largest(self, value: int) -> int:
        """The largest of all ranks' values: how ranks agree."""
        if self.world == 1:
            return value
        found = torch.tensor(value, device=self.device_type)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return int(found)

    def share(self, thing: Thing) -> Thing:
        """The first rank's `thing`, on every rank."""
        if self.world == 1:
            return thing
        box = [thing]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.world > 1:
            self.largest(0)

    @contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """The first rank runs the block, then the others do, finding in the cache what it made."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()


ALONE = Ranks()
