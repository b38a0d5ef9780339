"""Sharded tensors: reading and filling a rank's shard, and describing it as a DTensor.

FSDP2 makes each parameter a DTensor sharded along dimension 0, as `torch.chunk` would: ranks hold equal numbers of rows
except the last ones, which may hold fewer or none. A tensor rank's shard is a plain tensor, smaller than the model's
spec says, so that DDP, FSDP2 and fused kernels see nothing unusual; its `ParameterSplit` is kept beside the model, and
`as_dtensor` makes a DTensor of it, together with FSDP2's placement where there is one. All functions take plain tensors
too and treat them as whole. Filling needs no communication: each rank has the whole value and keeps its shard.
"""

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

REGISTRY = "splits"
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
"""Torch would warn that gathering over two axes takes two collectives."""


@dataclass(frozen=True)
class ParameterSplit:
    """How tensor or expert parallelism splits one parameter over a mesh axis; FSDP2 may shard the result again."""

    mesh: DeviceMesh
    """The tensor axis, or that of expert ranks."""
    grid: DeviceMesh
    """FSDP2's axes, that of `outer` and this one."""
    dim: int | None
    """The split dimension; None where the parameter is replicated."""
    size: int = 0
    """Size of the whole parameter along that dimension."""
    partial_gradient: bool = False
    """Whether gradients must be summed over the axis."""
    outer: "ParameterSplit | None" = None
    """Where two axes split a parameter, the outer one: expert ranks have experts, tensor ranks columns of each."""

    @property
    def cuts(self) -> "tuple[ParameterSplit, ...]":
        """The splits of every axis, outermost first."""
        outer = () if self.outer is None else self.outer.cuts
        return outer if self.dim is None else (*outer, self)

    @property
    def summed_over(self) -> tuple[DeviceMesh, ...]:
        """Axes that gradients must be summed over."""
        return (self.mesh,) if self.partial_gradient else ()

    def placed(self, cuts: "Sequence[ParameterSplit]") -> tuple[DeviceMesh, list[Any]]:
        """The mesh of `cuts`, and a placement for each of its axes."""
        from torch.distributed.tensor import Replicate, Shard

        placements: list[Any] = [Shard(cut.dim) for cut in cuts if cut.dim is not None]
        if self.outer is None:
            return cuts[0].mesh, placements
        inner_copies = self.dim is None and [Replicate()]  # such as biases that every tensor rank has
        return _without_fsdp(self), [*placements, *(inner_copies or [])]

    def bounds(self) -> tuple[int, int]:
        """Start and length of this rank's shard along `dim`."""
        return _chunk(self.size, self.mesh.size(), _place(self.mesh)[0])


@dataclass(frozen=True)
class BlockSplit(ParameterSplit):
    """How the axes of a mesh of tensor ranks split one parameter; its gradient is partial over axes that do not.

    Where two axes split the same dimension, the inner one splits it first and the outer one splits its parts.
    """

    axes: tuple[DeviceMesh, ...] = ()
    """The axes of `mesh`, outermost first."""
    dims: tuple[int | None, ...] = ()
    """The dimension that each axis splits, None for copies."""
    shape: tuple[int, ...] = ()
    """Shape of the whole parameter."""

    @property
    def cuts(self) -> tuple[ParameterSplit, ...]:
        """A split per axis that splits, outermost first."""
        shape, found = list(self.shape), list[ParameterSplit]()
        for axis, dim in reversed(list(zip(self.axes, self.dims, strict=True))):
            if dim is not None:
                found.insert(0, ParameterSplit(mesh=axis, grid=self.grid, dim=dim, size=shape[dim]))
                shape[dim] = found[0].bounds()[1]
        return tuple(found)

    @property
    def summed_over(self) -> tuple[DeviceMesh, ...]:
        """Axes of several ranks that have copies, made from different rows or heads."""
        return tuple(axis for axis, dim in zip(self.axes, self.dims, strict=True) if dim is None and axis.size() > 1)

    def placed(self, cuts: Sequence[ParameterSplit]) -> tuple[DeviceMesh, list[Any]]:
        """All axes, and a placement for each."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.placement_types import _StridedShard

        known = {cut.dim for cut in cuts}
        placements: list[Any] = []
        for number, dim in enumerate(self.dims):
            inner = [axis.size() for axis, other in zip(self.axes, self.dims, strict=True) if other == dim][1:]
            if dim is None or dim not in known:
                placements.append(Replicate())
            elif dim in self.dims[number + 1 :]:
                placements.append(_StridedShard(dim, split_factor=math.prod(inner)))
            else:
                placements.append(Shard(dim))
        return self.mesh, placements


def _chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of chunk `index`, as torch.chunk has it."""
    each = -(-size // parts)
    first = min(index * each, size)
    return first, min(each, size - first)


def _place(mesh: DeviceMesh) -> Sequence[int]:
    """This rank's index along every axis of `mesh`, which is known without asking process groups."""
    place = mesh.get_coordinate()
    assert place is not None, "this rank has no part of what the mesh splits"
    return place


def splits_of(model: nn.Module) -> Mapping[str, ParameterSplit]:
    """The split of each parameter by name; empty without tensor or expert parallelism."""
    found: Mapping[str, ParameterSplit] = vars(model).get(REGISTRY, {})
    return found


def remember_splits(model: nn.Module, splits: Mapping[str, ParameterSplit]) -> None:
    """Keep `splits` with the model, in place of earlier ones; its state dict has DTensors from now on."""
    is_hooked = REGISTRY in vars(model)
    vars(model)[REGISTRY] = dict(splits)
    if is_hooked:
        return

    def to_dtensors(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        for name, split in splits_of(module).items():
            if prefix + name in state:
                state[prefix + name] = as_dtensor(state[prefix + name], split)

    model.register_state_dict_post_hook(to_dtensors)


def is_shard(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether `tensor` is a DTensor."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:  # most are
        return False
    if not torch.distributed.is_available() or "torch.distributed.tensor" not in sys.modules:  # so no DTensor exists
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of `tensor`, sharing its memory; all of a plain tensor."""
    if not is_shard(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def whole(tensor: Tensor) -> Tensor:
    """All of `tensor`, on every rank. A collective for DTensors."""
    with torch.no_grad():
        return tensor.full_tensor() if is_shard(tensor) else tensor


def as_dtensor(tensor: Tensor, split: ParameterSplit | None) -> Tensor:
    """A shard of a parameter, gradient or optimizer state as a DTensor of the whole; unchanged where not split."""
    cuts = () if split is None else tuple(cut for cut in split.cuts if cut.dim is not None and cut.dim < tensor.ndim)
    if split is None or not cuts:
        return tensor
    mesh, placements = split.placed(cuts)
    if is_shard(tensor):
        mesh, placements = split.grid, [*_strided(tensor.placements, cuts), *placements]
    size = torch.Size(_whole_shape(list(tensor.shape), cuts))
    return _described(local(tensor).detach(), mesh, placements, size)


def _described(part: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: torch.Size) -> "DTensor":
    """A DTensor around `part`, which stays where it is: `DTensor.from_local` would move one on the host to the GPU."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(shape, _contiguous(shape), part.dtype)
    return DTensor(part, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def _without_fsdp(split: ParameterSplit) -> DeviceMesh:
    """The mesh of the two axes that split a parameter, without FSDP2's."""
    assert split.outer is not None
    return split.outer.grid


def _whole_shape(shape: list[int], cuts: Sequence[ParameterSplit]) -> list[int]:
    """The whole's shape from that of a shard, or of an optimizer state with fewer elements along a cut dimension."""
    for cut in cuts:
        assert cut.dim is not None
        own = cut.bounds()[1]
        shape[cut.dim] = cut.size if shape[cut.dim] == own else shape[cut.dim] * cut.mesh.size()
    return shape


def _strided(placements: Any, cuts: Sequence[ParameterSplit]) -> list[Any]:
    """FSDP2's placements where it shards a dimension that is already split."""
    from torch.distributed.tensor.placement_types import _StridedShard

    def after(placement: Any) -> Any:
        split_factor = math.prod(cut.mesh.size() for cut in cuts if placement.is_shard(cut.dim))
        return _StridedShard(placement.dim, split_factor=split_factor) if split_factor > 1 else placement

    return [after(placement) for placement in placements]


def shard_count(tensor: Tensor, split: ParameterSplit | None) -> int:
    """The number of different shards of a parameter; each is replicated on ranks / this number of ranks."""
    found = 1 if split is None else math.prod(cut.mesh.size() for cut in split.cuts)
    if is_shard(tensor):
        mesh = tensor.device_mesh
        found *= math.prod(mesh.size(axis) for axis, p in enumerate(tensor.placements) if p.is_shard())
    return found


def like_shard(part: Tensor, shard: "DTensor") -> "DTensor":
    """A DTensor with the placements and rows of `shard`, whose local tensor is `part`; its columns may differ."""
    shape = torch.Size((shard.shape[0], *part.shape[1:]))
    return _described(part, shard.device_mesh, shard.placements, shape)


def replace_local(parameter: "DTensor", part: Tensor) -> None:
    """Make `part`, of any dtype and on any device, this rank's shard of `parameter`, which stays the same object."""
    replacement = nn.Parameter(like_shard(part, parameter), requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, replacement)


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def first_element(tensor: Tensor) -> int:
    """Index, in the flattened whole tensor, of the first element of this rank's shard."""
    if not is_shard(tensor):
        return 0
    firsts = (first for first, _ in _bounds(tensor))
    return sum(first * stride for first, stride in zip(firsts, _contiguous(tensor.shape), strict=True))


def local_region(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Start and length of this rank's shard along every dimension."""
    return tuple(_bounds(tensor)) if is_shard(tensor) else tuple((0, size) for size in tensor.shape)


@torch.no_grad()
def copy_whole(target: Tensor, values: Tensor, index: int | None = None) -> None:
    """Copy whole `values` into `target`, or into `target[index]`; a DTensor takes this rank's shard of them."""
    if not is_shard(target):
        (target if index is None else target[index]).copy_(values)
        return
    here, bounds = local(target), _bounds(target)
    parts = tuple(slice(first, first + count) for first, count in bounds)
    if index is None:
        here.copy_(values[parts])
    elif parts[0].start <= index < parts[0].stop:
        here[index - parts[0].start].copy_(values[parts[1:]])


def _bounds(shard: "DTensor") -> list[tuple[int, int]]:
    """Start and length of this rank's shard along every dimension; inner mesh axes split before outer ones."""
    firsts, counts = [0] * shard.ndim, list(shard.shape)
    mesh = shard.device_mesh
    place = _place(mesh)
    for axis in reversed(range(mesh.ndim)):
        dim = getattr(shard.placements[axis], "dim", None)
        if dim is not None:
            first, counts[dim] = _chunk(counts[dim], mesh.size(axis), place[axis])
            firsts[dim] += first
    assert math.prod(counts) == local(shard).numel(), f"{counts} of {shard.shape} as {shard.placements}"
    return list(zip(firsts, counts, strict=True))
