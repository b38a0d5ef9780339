"""Ranks: this process's rank on the data axis and among all processes, and small collectives of the training loop.

On the data axis: which rows a process reads, and sums over them (`rank`, `world`, `sum`). Over ranks that have pieces
of the same rows: `sum_over_context_ranks`; over both: `sum_over_batch`. Over all processes of a run, of every axis:
`first`, `on_first`, `sum_over_all`, `max`, `broadcast`, `barrier`.

`ALONE`, the default everywhere, communicates nothing and copies nothing. Every method that communicates must be called
by all ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tightfit.errors import UserError
from tightfit.parallel.mesh import context_ranks_group, long_wait_group

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Ranks:
    """Rank `rank` of the `world` data ranks in `group`, and process `process` of `processes`."""

    rank: int = 0
    world: int = 1
    group: dist.ProcessGroup | None = None
    device_type: str = "cpu"
    """Where tensors of collectives must be: "cuda" for NCCL."""
    process: int = 0
    processes: int = 1
    context_ranks: int = 1
    """Number of ranks that every row is split over."""
    context_ranks_group: dist.ProcessGroup | None = None
    stages: int = 1
    """Pipeline ranks (the outermost axis), each with its own layers."""
    stage_group: dist.ProcessGroup | None = None
    long_wait_group: dist.ProcessGroup | None = None
    """Group of all processes, with a timeout of hours."""

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> "Ranks":
        """The ranks of the mesh's data axis, and all processes of the running group."""
        if mesh is None:
            return ALONE
        data = mesh["data"]
        found = cls(
            rank=data.get_local_rank(),
            world=data.size(),
            group=data.get_group(),
            device_type=mesh.device_type,
            process=dist.get_rank(),
            processes=mesh.size(),
            long_wait_group=long_wait_group(mesh),
        )
        axes = mesh.mesh_dim_names or ()
        if (rows := context_ranks_group(mesh)) is not None:
            found = replace(found, context_ranks=rows.size(), context_ranks_group=rows)
        if "pipeline" in axes:
            found = replace(found, stages=mesh["pipeline"].size(), stage_group=mesh.get_group("pipeline"))
        return found

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.process == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the data axis; alone, the tensor itself."""
        return _summed(tensor, self.world, self.group)

    def sum_over_context_ranks(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that have pieces of the same rows; where rows are whole, the tensor itself."""
        return _summed(tensor, self.context_ranks, self.context_ranks_group)

    def sum_over_batch(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks that have rows of the batch, or pieces of rows."""
        return self.sum_over_context_ranks(self.sum(tensor))

    def sum_over_all(self, tensor: Tensor) -> Tensor:
        """The sum over all processes; alone, the tensor itself."""
        return _summed(tensor, self.processes, None)

    def max(self, value: int) -> int:
        """The maximum over all processes."""
        if self.processes == 1:
            return value
        found = torch.tensor(value, device=self.device_type)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def broadcast(self, thing: Thing) -> Thing:
        """The first process's `thing`, on every process."""
        if self.processes == 1:
            return thing
        box = [thing]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def on_first(self, function: Callable[[], Thing]) -> Thing:
        """What `function` returns on the first process, on every process; its UserError is raised on all of them. The
        others wait with a timeout of hours."""
        found: Thing | None = None
        refusal: str | None = None
        if self.first:
            try:
                found = function()
            except UserError as error:
                refusal = str(error)
        self.barrier()
        found, refusal = self.broadcast((found, refusal))
        if refusal is not None:
            raise UserError(refusal)
        return cast(Thing, found)

    @property
    def is_stage_leader(self) -> bool:
        """Whether this process sends its stage's tensors to the first process: one per pipeline rank does."""
        return self.process % (self.processes // self.stages) == 0

    def gather_stages(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all pipeline stages on the first process, nothing on the others.

        `own` are this stage's: whole, and in host memory.
        """
        if self.stages == 1:
            return own if self.first else {}
        if not self.is_stage_leader:
            return {}
        by_stage: list[Any] | None = [None] * self.stages if self.first else None
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in own.items()]
        dist.gather_object(shapes, by_stage, group=self.stage_group, group_dst=0)
        if by_stage is None:
            for tensor in own.values():
                dist.send(tensor.contiguous(), group=self.stage_group, group_dst=0)
            return {}
        found = dict(own)
        for stage, theirs in enumerate(by_stage[1:], 1):
            for name, shape, dtype in theirs:
                dist.recv(tensor := torch.empty(shape, dtype=dtype), group=self.stage_group, group_src=stage)
                found.setdefault(name, tensor)
        return found

    def barrier(self) -> None:
        """Wait for all processes, with a timeout of hours."""
        if self.processes > 1:
            dist.barrier(self.long_wait_group) if self.long_wait_group is not None else self.max(0)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The first process runs the block before the others do, which then find its results in a cache on disk."""
        if not self.first:
            self.barrier()
        yield
        if self.first:
            self.barrier()


def _summed(tensor: Tensor, ranks: int, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over the ranks of `group` (None: all processes); of one, the tensor itself."""
    if ranks == 1:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total


class LateMax:
    """`Ranks.max` of the values of the call before, so that no rank waits for slower ones."""

    def __init__(self, ranks: Ranks) -> None:
        self.device_type = ranks.device_type
        self._in_flight: tuple[Tensor, dist.Work] | None = None

    def __call__(self, value: int) -> int:
        """Start the maximum of `value`; returns that of the call before, 0 at first."""
        before, largest = self._in_flight, torch.tensor(value, device=self.device_type)
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._in_flight = largest, work
        if before is None:
            return 0
        before[1].wait()
        return int(before[0])


ALONE = Ranks()
