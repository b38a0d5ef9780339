"""A model whose optimizer states, and optionally weights, are offloaded to host memory.

The decoder arrives on the host in full precision. Parameters are placed one by one: offloaded tensors get pinned host
memory, the others go to the GPU, and the original is freed; so the host never holds a parameter twice, and the GPU
never the whole model. Then forward pre-hooks make every layer wait for the updates of its own weights.

Each rank has the states of the weights it updates: of its layers (pipeline), its rows or columns (tensor), its shard
(ZeRO). FSDP2's shards then are in the model's own dtype, and so are their gradients, as on one GPU; the float32 masters
are on the host. FSDP2 must all-gather a layer's shards only after their update, so the hooks are on FSDP2's modules and
run before FSDP2's own.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tightfit.collectives.shards import as_dtensor, is_shard, like_shard, local, splits_of
from tightfit.jobs.levers import Levers
from tightfit.jobs.state_format import moment_bytes
from tightfit.levers.host_update import HostUpdates, faster_route
from tightfit.levers.offload import LAYERS, ON_GPU, placements
from tightfit.levers.policy.offload import offloads_states
from tightfit.levers.shard_streaming import ShardStream
from tightfit.levers.state_link import OffloadedMatrix, StateLink
from tightfit.levers.weight_streaming import WEIGHT, StreamedParameter, WeightStream
from tightfit.memory.host import host_empty, mark_on_host
from tightfit.models.decoder import Decoder
from tightfit.parallel.shard_groups import ShardGroup, Shards
from tightfit.train.optimizer.streamed_updater import StreamedUpdater

Named = Sequence[tuple[str, nn.Parameter]]
WeightUser = tuple[nn.Module, list[OffloadedMatrix], ShardGroup | None]


class Offloading:
    """Places parameters: `offload` those on the host and `move_to_gpu` the others, then `finish`."""

    def __init__(
        self,
        named: Named,
        levers: Levers,
        device: torch.device,
        compute_dtype: torch.dtype | None,
        shards: Shards,
    ) -> None:
        self.shards = shards
        self.device, self.masters, self.update_route = device, compute_dtype is not None, levers.offload_update
        self.dtype = compute_dtype or named[0][1].dtype
        wide = named[0][1].dtype == torch.float32
        own = [(name, mark_on_host(local(parameter.data))) for name, parameter in named]
        self.placements = placements(own, levers, moment_bytes(levers, wide=wide) + 4 * self.masters)
        self.link = StateLink(device, frees_gradients=levers.update_in_backward)
        self.matrices: dict[str, OffloadedMatrix] = {}
        self.stream: WeightStream | None = None

    @classmethod
    def of_levers(
        cls,
        named: Named,
        levers: Levers,
        device: torch.device | None,
        compute_dtype: torch.dtype | None,
        sharded: nn.Module | None,
    ) -> "Offloading | None":
        """An Offloading, or None where all states stay on the GPU; `device` defaults to that of the parameters, and
        FSDP2's modules are looked for in `sharded`."""
        if not offloads_states(levers):
            return None
        return cls(named, levers, device or named[0][1].device, compute_dtype, Shards(sharded))

    def is_offloaded(self, name: str) -> bool:
        """Whether this parameter's states are on the host."""
        return self.placements.get(name, ON_GPU).states_offloaded

    def move_to_gpu(self, parameter: nn.Parameter) -> None:
        """Copy this parameter to the GPU, where it stays."""
        self.shards.place(parameter, self._on_gpu(local(parameter.data)))

    def _on_gpu(self, given: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(given.shape, dtype=dtype or given.dtype, device=self.device).copy_(given)

    def offload(self, updater: StreamedUpdater, name: str, parameter: nn.Parameter, first: int) -> Tensor:
        """Put this parameter's states and, by its placement, its weight on the host; returns the tensor AdamW updates.

        `first` is the index of the local shard's first element in the whole weight.
        """
        placement, given = self.placements[name], local(parameter.data)
        on_host = self.masters or placement.weight_offloaded
        if on_host:
            updated = host_empty(given.shape, given.dtype, self.device, "master weights" if self.masters else "weights")
            updated.copy_(given)
        if placement.weight_offloaded:
            self._release(parameter)
        else:
            placed = self.shards.place(parameter, self._on_gpu(given, self.dtype))
            updated = updated if on_host else placed
        matrix = updater.add(name, updated, on_host=on_host, deferred=placement.deferred, first=first)
        matrix.weight_offloaded = placement.weight_offloaded
        self.matrices[name] = matrix
        return updated

    def _release(self, parameter: nn.Parameter) -> None:
        """Free the memory of a weight that streaming will copy into a buffer for each use."""
        if is_shard(parameter):
            self.shards.group_of[id(parameter)].release(parameter, self.dtype, self.device)
        else:
            parameter.data = torch.empty((), dtype=self.dtype, device=self.device).expand(parameter.shape)

    def finish(self, model: Decoder, named: Named) -> None:
        """After all parameters are placed: allocate buffers, and register the hooks that wait for updates."""
        if not self.matrices:
            return
        self.link.allocate()
        if "host" in (self.update_route, self.update_route == "auto" and faster_route(self.device)[0]):
            largest = max(matrix.rows_per_piece * matrix.width for matrix in self.matrices.values())
            self.link.host = HostUpdates(self.device, largest, self.dtype)
        if any(matrix.weight_offloaded for matrix in self.matrices.values()):
            self._stream_weights(model, dict(named))
        users = self._gathered_by(named) if self.shards.groups else self._used_by(model)
        for index, (module, matrices, group) in reversed(list(enumerate(users))):  # so the first user's index stays
            for matrix in matrices:
                matrix.forward_index = index
            module.register_forward_pre_hook(partial(_wait_until_updated, self.link, matrices, group), prepend=True)

    def _used_by(self, model: Decoder) -> Iterator[WeightUser]:
        """Modules in forward order, and the matrices that each uses; the loss reads the head's weight, which may be
        the embedding's, right after the final norm. Modules of other pipeline ranks are None."""
        layers = [(layer, (f"{LAYERS}{name}.",)) for name, layer in model.layers._modules.items()]
        first = [(model, ("embed.", "positions.")), (model.embed, ("embed.",)), (model.positions, ("positions.",))]
        for module, prefixes in [*first, *layers, (model.norm, ("head.", "embed."))]:
            if module is not None:
                yield module, [m for name, m in self.matrices.items() if name.startswith(prefixes)], None

    def _gathered_by(self, named: Named) -> Iterator[WeightUser]:
        """FSDP2's modules in forward order, and the matrices that FSDP2 all-gathers before each."""
        names = {id(parameter): name for name, parameter in named}
        for group in self.shards.groups:
            gathered = (names.get(id(parameter), "") for parameter in group.parameters)  # frozen ones have no name here
            yield group.module, [self.matrices[name] for name in gathered if name in self.matrices], group

    def synchronize(self) -> None:
        """Block until all states of the last step have arrived on the host."""
        self.link.synchronize()

    def weights(self, model: Decoder) -> dict[str, Tensor]:
        """The model's state dict, with offloaded weights taken from the host."""
        away, splits = self.streamed_weights(model), splits_of(model)
        return {
            name: as_dtensor(away[name], splits.get(name)) if name in away else tensor
            for name, tensor in model.state_dict().items()
        }

    def streamed_weights(self, model: Decoder) -> dict[str, Tensor]:
        """The offloaded weights from the host, in the model's dtype, by name (the parameters themselves point to
        streaming buffers, which hold some layer)."""
        self.synchronize()
        return {
            name: self._on_host(parameter, self.matrices[name])
            for name, parameter in model.named_parameters()
            if name in self.matrices and self.matrices[name].weight_offloaded
        }

    def _on_host(self, parameter: nn.Parameter, matrix: OffloadedMatrix) -> Tensor:
        weight = matrix.tensors[WEIGHT].to(self.dtype)
        if is_shard(parameter):
            return like_shard(weight.view(local(parameter).shape), parameter)
        return weight.view(parameter.shape)

    def _stream_weights(self, model: Decoder, parameters: dict[str, nn.Parameter]) -> None:
        offloaded = {name: matrix for name, matrix in self.matrices.items() if matrix.weight_offloaded}
        if self.shards.groups:
            self._stream_shards({id(parameters[name]): matrix for name, matrix in offloaded.items()})
            return
        streamed = [
            [StreamedParameter(parameters[n], m) for n, m in offloaded.items() if n.startswith(f"{LAYERS}{layer}.")]
            for layer in model.layers._modules  # by name: a pipeline rank has some layers only
        ]
        self.stream = WeightStream(streamed, self.dtype, self.link)

    def _stream_shards(self, offloaded: dict[int, OffloadedMatrix]) -> None:
        """Stream the parameters of FSDP2's groups that are on the host; `offloaded` has their matrices by id."""
        groups = [each for each in self.shards.groups if any(id(p) in offloaded for p in each.parameters)]
        streamed = [
            [StreamedParameter(p, offloaded[id(p)]) for p in group.parameters if id(p) in offloaded] for group in groups
        ]
        ShardStream(groups, streamed, self.dtype, self.link)


def _wait_until_updated(link: StateLink, matrices: list[OffloadedMatrix], group: ShardGroup | None, *_: object) -> None:
    for matrix in matrices:
        link.wait_until_updated(matrix)
        if group is not None:
            group.gather_after(matrix.weight_ready)
