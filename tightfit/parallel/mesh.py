"""The device mesh: the ranks of a run as a grid with one named axis per kind of parallelism.

The axes, outermost first, are `AXES`: neighbours on the innermost axis are neighbouring ranks, which share the fastest
links. Only axes of more than one rank exist, except `data`, which always does. Gradients are summed, and ZeRO splits,
over data and context ranks together: where there are context ranks, a second mesh has both axes as one, `data`; for
hybrid sharding it is split in two, `replicate` over groups and `shard` inside them. A third mesh has the context axis
split into `ring` and, inside it, `heads`. The mesh is made once and passed explicitly; no global holds it. Processes
are started by torchrun, or with its variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR), which `init_distributed` and
torch.distributed read. `make_mesh` takes any initialised process group, a fake one too. Expert ranks are neighbours on
the axis of data and context ranks: a mesh of their own has it split into `expert_data` (ranks that hold the same
experts) and `expert` (ranks that hold different ones). Where tensor ranks form a mesh of their own (2D, 2.5D, 3D), it
has the tensor axis split into `depth`, `row` and `column`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from tightfit.errors import UserError
from tightfit.jobs.layout import Layout

AXES = ("pipeline", "data", "context", "tensor")
HYBRID = ("replicate", "shard")
"""The data axis under hybrid sharding."""
CONTEXT = ("ring", "heads")
"""The context axis: ranks that pass keys and values round a ring, and inside it ranks that exchange heads."""
BLOCKS = ("depth", "row", "column")
"""The tensor axis of 2D, 2.5D and 3D tensor parallelism; a 2D mesh has a depth of 1."""
SUBMESHES = "tightfit_sharding"
"""Name of the mesh attribute that holds its submeshes. They are made once, with the mesh: torch lets no mesh have an
axis both whole and split, and slices a mesh wrongly under fake tensors."""
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
TIMEOUT = timedelta(minutes=10)
"""How long collectives wait; a rank that dies is noticed sooner."""
LONG_TIMEOUT = timedelta(hours=6)
"""How long barriers wait while one process works alone: tokenizes a corpus, or writes a checkpoint."""
LONG_WAIT_GROUP = "tightfit_patient"
"""Name of the mesh attribute that holds the name of the group with LONG_TIMEOUT."""


def make_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The grid of `layout` over the processes of the initialised group."""
    check_world(layout, dist.get_world_size())
    degrees = {axis: getattr(layout, axis) for axis in AXES}
    used = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis == "data"}
    mesh = init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))
    reducing = _reducing_mesh(mesh, layout)
    summing = _submeshes(mesh, reducing) | _block_axes(reducing, layout)
    vars(mesh)[SUBMESHES] = summing | _context_axes(mesh, layout) | _expert_submeshes(mesh, layout)
    return mesh


def grid_of(layout: Layout) -> dict[str, Any]:
    """The fields of `layout` on which its groups of ranks depend: layouts that agree in them can share a mesh."""
    return layout.model_dump(include={*AXES, "ring", "expert", "shard_inside", "tensor_mesh", "tensor_depth"})


def _block_axes(reducing: DeviceMesh, layout: Layout) -> dict[str, DeviceMesh]:
    """Submeshes of tensor ranks on a mesh: each axis, all three together, and these with FSDP2's axes."""
    if layout.tensor_mesh == "1d":
        return {}
    degrees = dict(zip(BLOCKS, layout.tensor_axes, strict=True))
    grid = _with_axes(reducing, {"tensor": degrees})
    data = tuple(axis for axis in ("data", *HYBRID) if axis in (grid.mesh_dim_names or ()))
    return {axis: grid[axis] for axis in BLOCKS} | {"blocks": grid[BLOCKS], "blocks_grid": grid[(*data, *BLOCKS)]}


def _reducing_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """The mesh with data and context ranks on one axis (two for hybrid sharding); the mesh itself without either."""
    if layout.zero_groups == 1 and layout.context == 1:
        return mesh
    summed = {"data": layout.gradient_ranks}
    if layout.zero_groups > 1:
        summed = dict(zip(HYBRID, (layout.zero_groups, layout.gradient_ranks // layout.zero_groups), strict=True))
    return _with_axes(mesh, {"data": summed, "context": {}})


def _with_axes(mesh: DeviceMesh, changed: dict[str, dict[str, int]]) -> DeviceMesh:
    """A mesh of the same ranks in which the axes named in `changed` are replaced by others."""
    shape: dict[str, int] = {}
    for axis, degree in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True):
        shape |= changed.get(axis, {axis: degree})
    return init_device_mesh(mesh.device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def _expert_submeshes(mesh: DeviceMesh, layout: Layout) -> dict[str, DeviceMesh]:
    """Submeshes of experts: the expert axis, FSDP2's axes of experts, both (with tensor), and both without FSDP2's."""
    if layout.expert == 1:
        return {}
    copies = {"replicate": layout.zero_groups} if layout.zero_groups > 1 else {}
    holders = copies | {"expert_data": layout.gradient_ranks // layout.zero_groups // layout.expert}
    grid = _with_axes(mesh, {"data": holders | {"expert": layout.expert}, "context": {}})
    inner = ("expert", "tensor") if layout.tensor > 1 else ("expert",)
    return {
        "expert": grid["expert"],
        "expert_sharding": grid[tuple(holders)],
        "expert_grid": grid[(*holders, *inner)],
        "expert_cuts": grid[inner],
    }


def _submeshes(mesh: DeviceMesh, reducing: DeviceMesh) -> dict[str, DeviceMesh]:
    data = tuple(axis for axis in ("data", *HYBRID) if axis in (reducing.mesh_dim_names or ()))
    found = {"sharding": reducing[data]}
    if "tensor" in (mesh.mesh_dim_names or ()):
        found |= {"tensor": mesh["tensor"], "both": reducing[(*data, "tensor")]}
    return found


def _context_axes(mesh: DeviceMesh, layout: Layout) -> dict[str, DeviceMesh]:
    """The axes of CONTEXT that have more than one rank."""
    degrees = dict(zip(CONTEXT, (layout.ring, layout.ulysses_ranks), strict=True))
    used = [axis for axis, degree in degrees.items() if degree > 1]
    both = mesh if len(used) < len(CONTEXT) else _with_axes(mesh, {"context": degrees})
    return {axis: both["context" if both is mesh else axis] for axis in used}


def sharding_axes(mesh: DeviceMesh) -> DeviceMesh:
    """The submesh for DDP and FSDP2: `data` (and context ranks), or `replicate` and `shard`."""
    found: DeviceMesh = vars(mesh)[SUBMESHES]["sharding"]
    return found


def context_ranks_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of ranks that have pieces of the same rows; None where rows are whole."""
    return mesh.get_group("context") if "context" in (mesh.mesh_dim_names or ()) else None


def context_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup | None:
    """The group of axis `ring` or `heads`; None where that has one rank."""
    found: DeviceMesh | None = vars(mesh)[SUBMESHES].get(axis)
    return None if found is None else found.get_group()


def tensor_axes(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """The tensor axis alone, and together with FSDP2's axes."""
    submeshes = vars(mesh)[SUBMESHES]
    return submeshes["tensor"], submeshes["both"]


@dataclass(frozen=True)
class BlockAxes:
    """The submeshes of 2D, 2.5D and 3D tensor parallelism."""

    depth: DeviceMesh
    row: DeviceMesh
    column: DeviceMesh
    mesh: DeviceMesh
    """All three axes."""
    grid: DeviceMesh
    """FSDP2's axes and those three."""


def block_axes(mesh: DeviceMesh) -> BlockAxes:
    """The submeshes of tensor ranks that form a mesh."""
    return BlockAxes(*(vars(mesh)[SUBMESHES][name] for name in (*BLOCKS, "blocks", "blocks_grid")))


@dataclass(frozen=True)
class ExpertAxes:
    """The submeshes of expert parallelism."""

    expert: DeviceMesh
    """Ranks that hold different experts, and send each other tokens."""
    sharding: DeviceMesh
    """Ranks that hold the same experts: FSDP2's axes of experts."""
    grid: DeviceMesh
    """FSDP2's axes, expert axis and tensor axis."""
    cuts: DeviceMesh
    """Expert axis and tensor axis."""


def expert_axes(mesh: DeviceMesh) -> ExpertAxes | None:
    """The submeshes of experts; None where every data rank holds all of them."""
    found = vars(mesh)[SUBMESHES]
    if "expert" not in found:
        return None
    names = ("expert", "expert_sharding", "expert_grid", "expert_cuts")
    return ExpertAxes(*(found[name] for name in names))


def long_wait_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """All processes, with a long timeout; None for a mesh that was not made by `init_distributed`."""
    name = vars(mesh).get(
        LONG_WAIT_GROUP
    )  # by name: saving DTensors copies their mesh, which a group would not survive
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return None if name is None else resolve(name)


def check_world(layout: Layout, processes: int) -> None:
    """Raise a UserError unless there are as many processes as the layout has ranks."""
    if processes != layout.ranks:
        program = f"torchrun --nproc-per-node={layout.ranks} -m tightfit train JOB"
        many = f"start it with `tightfit launch JOB`, or with {program}"
        fix = many if layout.ranks > 1 else f"start it without torchrun or set layout.data={processes}"
        raise UserError(f"the job's layout has {layout.ranks} rank(s), but {processes} process(es) run; {fix}")


@contextmanager
def init_distributed(layout: Layout, device: torch.device) -> Iterator[tuple[DeviceMesh | None, torch.device]]:
    """The mesh (None for a single process) and this rank's device; destroys the process group on a clean exit."""
    running = dist.is_available() and dist.is_initialized()
    check_world(layout, dist.get_world_size() if running else int(os.environ.get("WORLD_SIZE", "1")))
    if layout.ranks == 1:
        yield None, device
        return
    own = _local_device(device)
    if not running:
        _init_process_group(BACKENDS[own.type])
    _require_same_layout(layout)
    mesh = make_mesh(layout, own.type)
    _set_timeouts(mesh)
    vars(mesh)[LONG_WAIT_GROUP] = dist.new_group(backend="gloo", timeout=LONG_TIMEOUT).group_name
    yield mesh, own
    if not running:
        dist.destroy_process_group()  # not after an error: other ranks may be waiting in a collective


def _init_process_group(backend: str) -> None:
    """Join the process group that torchrun's variables describe.

    After a restart torchrun's store still has the addresses of the processes that died (torch 2.13); a prefix per
    attempt keeps them apart.
    """
    store, rank, world = next(rendezvous("env://", timeout=TIMEOUT))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=TIMEOUT)


def _require_same_layout(layout: Layout) -> None:
    """Raise a UserError where processes have different layouts: making process groups would then hang forever."""
    own = layout.model_dump()
    by_rank: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    for name in own:
        found = {rank: fields[name] for rank, fields in enumerate(by_rank)}
        other = next((rank for rank in found if found[rank] != found[0]), None)
        if other is not None:
            raise UserError(
                f"the processes of this run do not agree on the layout: {name} is {found[0]} on rank 0 and "
                f"{found[other]} on rank {other}; start all of them with the same job file and overrides"
            )


def _set_timeouts(mesh: DeviceMesh) -> None:
    """TIMEOUT for the groups of every axis; torch's default is 30 minutes for gloo."""
    for each in (mesh, *vars(mesh)[SUBMESHES].values()):
        for group in each.get_all_groups():
            _set_pg_timeout(TIMEOUT, group)


def _local_device(device: torch.device) -> torch.device:
    """This rank's GPU, by torchrun's LOCAL_RANK; the CPU is shared."""
    if device.type != "cuda":
        return device
    rank, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= found:
        raise UserError(f"process {rank} of this machine has no GPU, as there are {found}; start one process per GPU")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)
