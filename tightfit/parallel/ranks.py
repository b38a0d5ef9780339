"""Ranks: who a process is on the data axis and among all, and what it says apart from weights and gradients.

The data axis says which rows a process takes, and sums over them (`rank`, `world`, `sum`). All processes of a run,
those of other axes too, agree on things together (`first`, `total`, `largest`, `share`, `wait`).

Alone (`ALONE`, the default everywhere) nothing is said and nothing is copied, so a single process pays nothing.
Every method that talks must be called by all ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tightfit.parallel.mesh import patient_group

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Ranks:
    """This is rank `rank` of the `world` data ranks of `group`, and process `process` of `processes`."""

    rank: int = 0
    world: int = 1
    group: dist.ProcessGroup | None = None
    device_type: str = "cpu"
    """Where messages are: on the GPUs where the group talks between GPUs."""
    process: int = 0
    processes: int = 1
    stages: int = 1
    """Pipeline ranks, each of which holds other weights; theirs is the outermost axis."""
    stage_group: dist.ProcessGroup | None = None
    patient: dist.ProcessGroup | None = None
    """All processes, where they may wait for long."""

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> "Ranks":
        """The ranks of the mesh's data axis, and all processes of the running group."""
        if mesh is None:
            return ALONE
        data = mesh["data"]
        found = cls(
            data.get_local_rank(), data.size(), data.get_group(), mesh.device_type, dist.get_rank(), mesh.size(),
            patient=patient_group(mesh),
        )  # fmt: skip
        if "pipeline" not in (mesh.mesh_dim_names or ()):
            return found
        return replace(found, stages=mesh["pipeline"].size(), stage_group=mesh.get_group("pipeline"))

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.process == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Added up over the data axis; alone, the tensor itself."""
        if self.world == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def total(self, tensor: Tensor) -> Tensor:
        """Added up over all processes; alone, the tensor itself."""
        if self.processes == 1:
            return tensor
        found = tensor.clone()
        dist.all_reduce(found)
        return found

    def largest(self, value: int) -> int:
        """The largest of all processes' values: how they agree."""
        if self.processes == 1:
            return value
        found = torch.tensor(value, device=self.device_type)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def share(self, thing: Thing) -> Thing:
        """The first process's `thing`, on every one."""
        if self.processes == 1:
            return thing
        box = [thing]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    @property
    def speaks_for_stage(self) -> bool:
        """Whether this process is in the pipeline of the first one, and hands it what its stage has."""
        return self.process % (self.processes // self.stages) == 0

    def united(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """What all stages have, on the first process; nothing on the others. `own` is whole and in host memory."""
        if self.stages == 1:
            return own if self.first else {}
        if not self.speaks_for_stage:
            return {}
        described: list[Any] | None = [None] * self.stages if self.first else None
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in own.items()]
        dist.gather_object(shapes, described, group=self.stage_group, group_dst=0)
        if described is None:
            for tensor in own.values():
                dist.send(tensor.contiguous(), group=self.stage_group, group_dst=0)
            return {}
        found = dict(own)
        for stage, theirs in enumerate(described[1:], 1):
            for name, shape, dtype in theirs:
                dist.recv(tensor := torch.empty(shape, dtype=dtype), group=self.stage_group, group_src=stage)
                found.setdefault(name, tensor)
        return found

    def wait(self) -> None:
        """Until all processes are here, however long one of them works alone."""
        if self.processes > 1:
            dist.barrier(self.patient) if self.patient is not None else self.largest(0)

    @contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """The first process runs the block, then the others do, finding in the cache what it made."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()


ALONE = Ranks()
