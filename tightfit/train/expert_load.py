"""The load of experts: tokens routed to each one, over all ranks and micro-batches, for metrics and the summary.

Routed layers count while they train (models/layers/mlp.py). `ExpertMeter.take` sums over all ranks: data and context
ranks have their own tokens, tensor ranks the same ones, pipeline ranks other layers; one all-reduce of [layers,
experts] a logged step.

Families that correct the choice of experts (models/layers/routing.py) balance their load without a loss: after every
step the bias of an expert that got more than its share falls by CORRECTION_RATE, and that of the others rises (Wang et
al. 2024; DeepSeek-V3's rate). All ranks have the same loads, so the biases stay equal. With `pure-bf16` the biases are
bf16, whose steps are coarser than the rate once a bias is above a quarter.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.collectives.shards import local, local_region
from tightfit.models.decoder import Decoder, Layer
from tightfit.models.layers.mlp import RoutedMlp
from tightfit.parallel.ranks import Ranks

CORRECTION_RATE = 1e-3


@dataclass(frozen=True)
class LayerLoad:
    """Load of one layer's experts: the busiest and the quietest as multiples of the mean, and how many got no token."""

    layer: int
    busiest: float
    quietest: float
    idle: int
    dropped: float = 0.0
    """Share of tokens dropped for want of expert capacity (jobs/experts.py)."""


class ExpertMeter:
    """Collects the loads of all routed layers of a model; every rank calls `take` alike."""

    def __init__(self, model: Decoder, ranks: Ranks) -> None:
        self.spec, self.ranks = model.spec, ranks
        self.own = dict(routed_layers(model))
        self.total: Tensor | None = None
        """Tokens routed to every expert and tokens dropped, [2, layers, experts], since the run began; on the host."""

    def take(self) -> Mapping[str, float]:
        """Metrics of the steps since the last call, by name; empty where the model has no experts."""
        if self.spec.experts is None:
            return {}
        found = self._over_all_ranks()
        self.total = found if self.total is None else self.total + found
        loads = layer_loads(*found)
        if not loads:
            return {}
        told = {
            "expert_load_max": max(load.busiest for load in loads),
            "expert_load_min": min(load.quietest for load in loads),
            "experts_idle": sum(load.idle for load in loads),
        }
        if self.spec.experts.capacity_factor is not None:
            told["experts_dropped"] = sum(load.dropped for load in loads) / len(loads)
        return told

    def of_run(self) -> tuple[LayerLoad, ...]:
        """Every routed layer's load over the whole run."""
        return () if self.total is None else layer_loads(*self.total)

    def _over_all_ranks(self) -> Tensor:
        assert self.spec.experts is not None
        device = self.ranks.device_type if self.ranks.processes > 1 else "cpu"
        counts = torch.zeros(2, self.spec.layers, self.spec.experts.count, dtype=torch.float64, device=device)
        for layer, mlp in self.own.items():
            if mlp.load is not None:
                counts[0, layer] = mlp.load.to(counts)
            if mlp.dropped is not None:
                counts[1, layer] = mlp.dropped.to(counts)
            for count in (mlp.load, mlp.corrected_load, mlp.dropped):
                if count is not None:
                    count.zero_()
        ranks = self.ranks
        other_tokens = ranks.world * ranks.context_ranks * ranks.stages  # tensor ranks count the same
        return (ranks.sum_over_all(counts) / (ranks.processes // other_tokens)).cpu()


@torch.no_grad()
def correct_choices(model: Decoder, ranks: Ranks) -> None:
    """Update the routing biases by the load of this step. Every rank calls this."""
    experts = model.spec.experts
    if experts is None or not experts.corrected:
        return
    layers = [mlp for _, mlp in routed_layers(model) if mlp.load is not None]
    if not layers:
        return
    loads = ranks.sum_over_batch(torch.stack([_new_load(mlp) for mlp in layers]).float())
    for mlp, load in zip(layers, loads, strict=True):
        assert mlp.correction is not None
        step = CORRECTION_RATE * torch.sign(load.mean() - load)
        own = local(mlp.correction)
        ((first, count),) = local_region(mlp.correction)
        own.add_(step[first : first + count].to(own))


def _new_load(mlp: RoutedMlp) -> Tensor:
    """Tokens by expert since the last correction."""
    assert mlp.load is not None
    found = mlp.load if mlp.corrected_load is None else mlp.load - mlp.corrected_load
    mlp.corrected_load = mlp.load.clone()
    return found


def routed_layers(model: Decoder) -> Iterator[tuple[int, RoutedMlp]]:
    """The routed layers of this rank, by their number in the whole model."""
    for layer in model.layers:
        assert isinstance(layer, Layer)
        if isinstance(layer.mlp, RoutedMlp):
            yield layer.attention.layer, layer.mlp


def layer_loads(counts: Tensor, dropped: Tensor) -> tuple[LayerLoad, ...]:
    """The load of each layer, from tokens [layers, experts]; none of layers without tokens: not routed, or not run."""
    return tuple(
        LayerLoad(
            layer=layer,
            busiest=float(row.max() / row.mean()),
            quietest=float(row.min() / row.mean()),
            idle=int((row == 0).sum()),
            dropped=float(dropped[layer].sum() / row.sum()),
        )
        for layer, row in enumerate(counts)
        if row.sum() > 0
    )
