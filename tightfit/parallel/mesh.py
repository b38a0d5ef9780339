"""The mesh: the ranks of a run as a grid with one named axis per way of splitting.

The axes, outermost first, are those of `AXES`: neighbours on the innermost axis are neighbouring ranks, which share the
fastest links. Only axes of more than one rank exist, except `data`, which always does. Where data ranks shard inside
groups only, a second mesh beside the first has two axes for it, `replicate` over groups and `shard` inside them. The
mesh is made once and handed to who needs it; nothing is kept in a global. Processes are torchrun's, and its variables
(RANK, WORLD_SIZE, LOCAL_RANK and the meeting place) are read by torch.distributed alone. `make_mesh` takes any
initialised group, a fake one too. Experts are split over ranks of these axes and will need none of their own.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
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
"""The data axis where groups of its ranks each hold a copy of what they shard."""
BESIDE = "tightfit_sharding"
"""Where a mesh keeps its slices: torch lets no mesh have an axis both whole and cut, and slices wrongly among fake
tensors, so it is done once, when the mesh is made."""
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for others in a collective before it gives up; a rank that dies is noticed sooner."""
PATIENCE = timedelta(hours=6)
"""The same where one process works alone and says so: it tokenizes a corpus, or writes a checkpoint."""
PATIENT = "tightfit_patient"


def make_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The grid of `layout` over the processes of the initialised group."""
    check_world(layout, dist.get_world_size())
    degrees = {axis: getattr(layout, axis) for axis in AXES}
    used = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis == "data"}
    mesh = init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))
    vars(mesh)[BESIDE] = _sliced(mesh, _with_groups(mesh, layout))
    return mesh


def _with_groups(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """The mesh with its data axis cut in two, where groups of ranks each hold a copy."""
    if layout.copies == 1:
        return mesh
    shape: dict[str, int] = {}
    for axis, degree in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True):
        cut = dict(zip(HYBRID, (layout.copies, layout.shard_inside), strict=True))
        shape |= cut if axis == "data" else {axis: degree}
    return init_device_mesh(mesh.device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def _sliced(mesh: DeviceMesh, grouped: DeviceMesh) -> dict[str, DeviceMesh]:
    data = ("data",) if grouped is mesh else HYBRID
    found = {"sharding": grouped[data]}
    if "tensor" in (mesh.mesh_dim_names or ()):
        found |= {"tensor": mesh["tensor"], "both": grouped[(*data, "tensor")]}
    return found


def sharding_axes(mesh: DeviceMesh) -> DeviceMesh:
    """The axes FSDP2 is given: `data`, or the two it is cut in."""
    found: DeviceMesh = vars(mesh)[BESIDE]["sharding"]
    return found


def tensor_axes(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """The tensor axis alone, and behind those FSDP2 is given."""
    made = vars(mesh)[BESIDE]
    return made["tensor"], made["both"]


def patient_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """All processes of a run, for waits that may be long; None where a mesh was made for less than a run."""
    name = vars(mesh).get(PATIENT)  # not the group itself: what saves DTensors copies their meshes
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return None if name is None else resolve(name)


def check_world(layout: Layout, processes: int) -> None:
    """As many processes as the layout has ranks, or a sentence."""
    if processes != layout.ranks:
        many = f"start it with torchrun --nproc-per-node={layout.ranks} -m tightfit train JOB"
        fix = many if layout.ranks > 1 else f"start it without torchrun or set layout.data={processes}"
        raise UserError(f"the job's layout has {layout.ranks} rank(s), but {processes} process(es) run; {fix}")


@contextmanager
def joined(layout: Layout, device: torch.device) -> Iterator[tuple[DeviceMesh | None, torch.device]]:
    """The mesh of this run (None for a single process) and this rank's device; the group ends with a clean exit."""
    running = dist.is_available() and dist.is_initialized()
    check_world(layout, dist.get_world_size() if running else int(os.environ.get("WORLD_SIZE", "1")))
    if layout.ranks == 1:
        yield None, device
        return
    own = _own_device(device)
    if not running:
        _meet(BACKENDS[own.type])
    _require_same(layout)
    mesh = make_mesh(layout, own.type)
    _limit_waiting(mesh)
    vars(mesh)[PATIENT] = dist.new_group(backend="gloo", timeout=PATIENCE).group_name
    yield mesh, own
    if not running:
        dist.destroy_process_group()  # not after an error: other ranks may be waiting in a collective


def _meet(backend: str) -> None:
    """Join the group that torchrun's variables describe.

    When torchrun starts all processes again they meet at the same store, which still has the addresses of those that
    died (torch 2.13); a prefix of this attempt's own keeps them apart.
    """
    store, rank, world = next(rendezvous("env://", timeout=TIMEOUT))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=TIMEOUT)


def _require_same(layout: Layout) -> None:
    """Before groups are made, which ranks of different layouts would wait for in vain."""
    own = layout.model_dump()
    everyones: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    for name in own:
        found = {rank: fields[name] for rank, fields in enumerate(everyones)}
        other = next((rank for rank in found if found[rank] != found[0]), None)
        if other is not None:
            raise UserError(
                f"the processes of this run do not agree on the layout: {name} is {found[0]} on rank 0 and "
                f"{found[other]} on rank {other}; start all of them with the same job file and overrides"
            )


def _limit_waiting(mesh: DeviceMesh) -> None:
    """TIMEOUT for the groups of every axis, which torch gives its own (30 minutes where they talk between CPUs)."""
    for part in (mesh, *vars(mesh)[BESIDE].values()):
        for group in part.get_all_groups():
            _set_pg_timeout(TIMEOUT, group)


def _own_device(device: torch.device) -> torch.device:
    """The GPU that torchrun gave this rank of the node; the CPU is everybody's."""
    if device.type != "cuda":
        return device
    rank, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= found:
        raise UserError(f"process {rank} of this machine has no GPU, as there are {found}; start one process per GPU")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)
