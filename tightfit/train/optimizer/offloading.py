"""A model whose optimizer states, and perhaps weights, live on the host: moved there once, waited for where needed.

The decoder comes on the host, in full precision. Each parameter is settled in turn: what travels gets pinned memory,
what stays goes to the GPU, and what it had on the host before is freed; so the host never holds it twice, and the GPU
never the whole. Then layers and model are told to wait, before they run, for the updates of their own weights.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tightfit.jobs.levers import Levers
from tightfit.jobs.state_format import moment_bytes
from tightfit.levers.host_update import HostUpdates, faster_route
from tightfit.levers.offload import LAYERS, STAYS, placements
from tightfit.levers.state_link import Home, StateLink
from tightfit.levers.weight_streaming import WEIGHT, Streamed, WeightStream
from tightfit.memory.host import host_empty
from tightfit.models.decoder import Decoder
from tightfit.train.optimizer.streamed_updater import StreamedUpdater

Named = Sequence[tuple[str, nn.Parameter]]


class Offloading:
    """Who lives where. `take` every parameter that is away, `bring` the others, then `open`."""

    def __init__(self, named: Named, levers: Levers, device: torch.device, compute_dtype: torch.dtype | None) -> None:
        self.device, self.masters = device, compute_dtype is not None
        self.dtype = compute_dtype or named[0][1].dtype
        wide = named[0][1].dtype == torch.float32
        self.places = placements(named, levers, moment_bytes(levers, wide=wide) + 4 * self.masters)
        self.link = StateLink(device)
        self.link.limited, self.update = levers.update_in_backward, levers.offload_update
        self.homes: dict[str, Home] = {}
        self.stream: WeightStream | None = None

    def is_away(self, name: str) -> bool:
        """Whether this parameter's states are on the host."""
        return self.places.get(name, STAYS).states_away

    def bring(self, parameter: nn.Parameter) -> None:
        """This one lives on the GPU."""
        parameter.data = parameter.data.to(self.device)

    def take(self, updater: StreamedUpdater, name: str, parameter: nn.Parameter) -> Tensor:
        """This one's states, and its weight if so placed, live on the host; returns what AdamW updates."""
        place, given = self.places[name], parameter.data
        on_host = self.masters or place.weight_away
        updated: Tensor = parameter
        if on_host:
            updated = host_empty(given.shape, given.dtype, self.device, "master weights" if self.masters else "weights")
            updated.copy_(given)
        if place.weight_away:  # weight streaming gives it memory
            parameter.data = torch.empty((), dtype=self.dtype, device=self.device).expand(given.shape)
        else:
            parameter.data = given.to(self.device, self.dtype)
        self.homes[name] = updater.add(name, updated, on_host=on_host, late=place.late)
        self.homes[name].weight_away = place.weight_away
        return updated

    def open(self, model: nn.Module, named: Named) -> None:
        """All have been taken: allocate what the link and the layers' slots need, and watch the forward pass."""
        if not self.homes:
            return
        assert isinstance(model, Decoder)
        self.link.open()
        if "host" in (self.update, self.update == "auto" and faster_route(self.device)[0]):
            largest = max(home.rows_per_piece * home.width for home in self.homes.values())
            self.link.host = HostUpdates(self.device, largest, self.dtype)
        if any(home.weight_away for home in self.homes.values()):
            self._stream_weights(model, dict(named))
        layers = [(layer, (f"{LAYERS}{index}.",)) for index, layer in enumerate(model.layers)]
        ends = (model, ("embed.", "positions.")), (model.norm, ("head.",))  # the loss, too, comes after the last norm
        modules: list[tuple[nn.Module, tuple[str, ...]]] = [ends[0], *layers, ends[1]]
        for place, (module, prefixes) in enumerate(modules):
            self._watch(module, prefixes, place)

    def _watch(self, module: nn.Module, prefixes: tuple[str, ...], place: int) -> None:
        """Before `module` runs, the current stream waits for the updates of weights so named."""
        homes = [home for name, home in self.homes.items() if name.startswith(prefixes)]
        for home in homes:
            home.place = place
        module.register_forward_pre_hook(partial(_settle, self.link, homes))

    def synchronize(self) -> None:
        """The host has all states as they are after the last step."""
        self.link.synchronize()

    def weights(self, model: Decoder) -> dict[str, Tensor]:
        """The model's own tensors by name, with those that live on the host taken from there."""
        self.synchronize()
        away = {name: home for name, home in self.homes.items() if home.weight_away}
        return {
            name: away[name].tensors[WEIGHT].view(tensor.shape).to(self.dtype) if name in away else tensor
            for name, tensor in model.state_dict().items()
        }

    def _stream_weights(self, model: Decoder, parameters: dict[str, nn.Parameter]) -> None:
        streamed = [
            [Streamed(parameters[name], home) for name, home in self.homes.items()
             if home.weight_away and name.startswith(f"{LAYERS}{index}.")]
            for index in range(len(model.layers))
        ]  # fmt: skip
        self.stream = WeightStream(streamed, self.dtype, self.link)


def _settle(link: StateLink, homes: list[Home], *_: object) -> None:
    for home in homes:
        link.settle(home)
