"""The load of experts: how many tokens each one got, over all ranks and micro-batches, told in metrics and at the end.

Routed layers count while they train (models/mlp.py). `ExpertMeter.take` adds up all ranks: data ranks have their own
tokens, tensor ranks the same ones, pipeline ranks other layers; one all-reduce of [layers, experts] a logged step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.models.decoder import Decoder, Layer
from tightfit.models.mlp import RoutedMlp
from tightfit.parallel.ranks import Ranks


@dataclass(frozen=True)
class LayerLoad:
    """Of one layer's experts: the busiest and the quietest as multiples of the mean, and how many got nothing."""

    layer: int
    busiest: float
    quietest: float
    idle: int


class ExpertMeter:
    """Collects the loads of all routed layers of a model; every rank calls `take` alike."""

    def __init__(self, model: Decoder, ranks: Ranks) -> None:
        self.spec, self.ranks = model.spec, ranks
        self.own = dict(routed_layers(model))
        self.total: Tensor | None = None
        """Tokens of every expert since the run began, [layers, experts], on the host."""

    def take(self) -> Mapping[str, float]:
        """Numbers for metrics about the steps since the last call; nothing where the model is not routed."""
        if self.spec.experts is None:
            return {}
        found = self._over_all_ranks()
        self.total = found if self.total is None else self.total + found
        loads = layer_loads(found)
        if not loads:
            return {}
        return {
            "expert_load_max": max(load.busiest for load in loads),
            "expert_load_min": min(load.quietest for load in loads),
            "experts_idle": sum(load.idle for load in loads),
        }

    def of_run(self) -> tuple[LayerLoad, ...]:
        """Every routed layer's load over the whole run."""
        return () if self.total is None else layer_loads(self.total)

    def _over_all_ranks(self) -> Tensor:
        assert self.spec.experts is not None
        device = self.ranks.device_type if self.ranks.processes > 1 else "cpu"
        counts = torch.zeros(self.spec.layers, self.spec.experts.count, dtype=torch.float64, device=device)
        for layer, mlp in self.own.items():
            if mlp.load is not None:
                counts[layer] = mlp.load.to(counts)
                mlp.load = None
        copies = self.ranks.processes // (self.ranks.world * self.ranks.stages)  # tensor ranks count the same tokens
        return (self.ranks.sum_over_all(counts) / copies).cpu()


def routed_layers(model: Decoder) -> Iterator[tuple[int, RoutedMlp]]:
    """The routed layers of this rank, by their number in the whole model."""
    for layer in model.layers:
        assert isinstance(layer, Layer)
        if isinstance(layer.mlp, RoutedMlp):
            yield layer.attention.layer, layer.mlp


def layer_loads(counts: Tensor) -> tuple[LayerLoad, ...]:
    """Of tokens by layer and expert; layers without any are not routed, or have not run."""
    return tuple(
        LayerLoad(layer, float(row.max() / row.mean()), float(row.min() / row.mean()), int((row == 0).sum()))
        for layer, row in enumerate(counts)
        if row.sum() > 0
    )
