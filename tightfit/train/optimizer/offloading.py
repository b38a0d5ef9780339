"""A model whose optimizer states, and optionally weights, are offloaded to host memory.

The decoder arrives on the host in full precision. Parameters are placed one by one: offloaded tensors get pinned host
memory, the others go to the GPU, and the original is freed; so the host never holds a parameter twice, and the GPU
never the whole model. Then forward pre-hooks make every layer wait for the updates of its own weights.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tightfit.jobs.levers import Levers
from tightfit.jobs.state_format import moment_bytes
from tightfit.levers.host_update import HostUpdates, faster_route
from tightfit.levers.offload import LAYERS, ON_GPU, placements
from tightfit.levers.state_link import OffloadedMatrix, StateLink
from tightfit.levers.weight_streaming import WEIGHT, StreamedParameter, WeightStream
from tightfit.memory.host import host_empty
from tightfit.models.decoder import Decoder
from tightfit.train.optimizer.streamed_updater import StreamedUpdater

Named = Sequence[tuple[str, nn.Parameter]]


class Offloading:
    """Places parameters: `offload` those on the host and `move_to_gpu` the others, then `finish`."""

    def __init__(self, named: Named, levers: Levers, device: torch.device, compute_dtype: torch.dtype | None) -> None:
        self.device, self.masters, self.update_route = device, compute_dtype is not None, levers.offload_update
        self.dtype = compute_dtype or named[0][1].dtype
        wide = named[0][1].dtype == torch.float32
        self.placements = placements(named, levers, moment_bytes(levers, wide=wide) + 4 * self.masters)
        self.link = StateLink(device, frees_gradients=levers.update_in_backward)
        self.matrices: dict[str, OffloadedMatrix] = {}
        self.stream: WeightStream | None = None

    def is_offloaded(self, name: str) -> bool:
        """Whether this parameter's states are on the host."""
        return self.placements.get(name, ON_GPU).states_offloaded

    def move_to_gpu(self, parameter: nn.Parameter) -> None:
        """Keep this parameter on the GPU."""
        parameter.data = parameter.data.to(self.device)

    def offload(self, updater: StreamedUpdater, name: str, parameter: nn.Parameter) -> Tensor:
        """Put this parameter's states, and its weight if placed so, on the host; returns what AdamW updates."""
        placement, given = self.placements[name], parameter.data
        on_host = self.masters or placement.weight_offloaded
        updated: Tensor = parameter
        if on_host:
            updated = host_empty(given.shape, given.dtype, self.device, "master weights" if self.masters else "weights")
            updated.copy_(given)
        if placement.weight_offloaded:  # weight streaming gives it memory
            parameter.data = torch.empty((), dtype=self.dtype, device=self.device).expand(given.shape)
        else:
            parameter.data = given.to(self.device, self.dtype)
        matrix = updater.add(name, updated, on_host=on_host, deferred=placement.deferred)
        matrix.weight_offloaded = placement.weight_offloaded
        self.matrices[name] = matrix
        return updated

    def finish(self, model: nn.Module, named: Named) -> None:
        """After all parameters are placed: allocate buffers, and register the hooks that wait for updates."""
        if not self.matrices:
            return
        assert isinstance(model, Decoder)
        self.link.allocate()
        if "host" in (self.update_route, self.update_route == "auto" and faster_route(self.device)[0]):
            largest = max(matrix.rows_per_piece * matrix.width for matrix in self.matrices.values())
            self.link.host = HostUpdates(self.device, largest, self.dtype)
        if any(matrix.weight_offloaded for matrix in self.matrices.values()):
            self._stream_weights(model, dict(named))
        layers = [(layer, (f"{LAYERS}{index}.",)) for index, layer in enumerate(model.layers)]
        first = model, ("embed.", "positions.")
        last = model.norm, ("head.",)  # the loss reads the head's weight right after the final norm
        modules: list[tuple[nn.Module, tuple[str, ...]]] = [first, *layers, last]
        for index, (module, prefixes) in enumerate(modules):
            self._wait_before(module, prefixes, index)

    def _wait_before(self, module: nn.Module, prefixes: tuple[str, ...], index: int) -> None:
        """Before `module` runs, the compute stream waits for the updates of weights with these name prefixes."""
        matrices = [matrix for name, matrix in self.matrices.items() if name.startswith(prefixes)]
        for matrix in matrices:
            matrix.forward_index = index
        module.register_forward_pre_hook(partial(_wait_until_updated, self.link, matrices))

    def synchronize(self) -> None:
        """Block until the host has all states as they are after the last step."""
        self.link.synchronize()

    def weights(self, model: Decoder) -> dict[str, Tensor]:
        """The model's state dict, with offloaded weights taken from the host."""
        self.synchronize()
        offloaded = {name: matrix for name, matrix in self.matrices.items() if matrix.weight_offloaded}
        return {
            name: offloaded[name].tensors[WEIGHT].view(tensor.shape).to(self.dtype) if name in offloaded else tensor
            for name, tensor in model.state_dict().items()
        }

    def _stream_weights(self, model: Decoder, parameters: dict[str, nn.Parameter]) -> None:
        offloaded = {name: matrix for name, matrix in self.matrices.items() if matrix.weight_offloaded}
        streamed = [
            [StreamedParameter(parameters[n], m) for n, m in offloaded.items() if n.startswith(f"{LAYERS}{index}.")]
            for index in range(len(model.layers))
        ]
        self.stream = WeightStream(streamed, self.dtype, self.link)


def _wait_until_updated(link: StateLink, matrices: list[OffloadedMatrix], *_: object) -> None:
    for matrix in matrices:
        link.wait_until_updated(matrix)
