"""`factorise`: from a model to one in which two linear layers of lower rank replace each one (`low_rank.py`).

A first pass over all layers finds the singular values by which matrices share the budget of ranks; a second factors
each layer for inputs that came through the layers already factored. The result is a directory that tightfit loads, and
transformers too, through the short modelling file in it (models/low_rank.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightfit.compress.calibration.inputs import InputStatistics, output_error
from tightfit.compress.calibration.observation import layer_of, observe, through
from tightfit.compress.compression import LAYER_SHARDS, PLAIN_DTYPE, Progress
from tightfit.compress.cost import CompressionCost
from tightfit.compress.finished_layer import load_finished
from tightfit.compress.job import ShrinkingJob
from tightfit.compress.linear_sets import linear_sets
from tightfit.compress.report import CompressionReport, WriteExtras, no_extras
from tightfit.compress.rounding.moving_scales import linear
from tightfit.compress.structure.low_rank import Factors, LowRankMethod, choose_ranks, factor, singular_energies
from tightfit.compress.structure.rewriting import LayerRewriting, Rewritten
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.low_rank import MODELLING_FILE, factored_names, low_rank_config, modelling_code
from tightfit.models.quantized.directory import tensors_to_write
from tightfit.models.quantized.formats.own import Own
from tightfit.models.quantized.matrices import matrices
from tightfit.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class FactoringJob(ShrinkingJob):
    """What the user asked for; `keep` is the share of the matrices' numbers that stays."""

    method: LowRankMethod = "whitened"
    keep: float = 0.7


def factorise(
    job: FactoringJob,
    announce: Callable[[CompressionCost], None],
    progress: Progress,
    write_extras: WriteExtras = no_extras,
) -> CompressionReport:
    """Do `job`; `announce` is called with the predicted cost before anything is written."""
    return _Factoring(job, announce, write_extras).run(progress)


class _Factoring(LayerRewriting):
    job: FactoringJob

    def check(self) -> None:
        if not 0 < self.job.keep < 1:
            raise UserError(f"--keep is {self.job.keep}; it is the share of the matrices' numbers that stays, below 1")
        self.names = factored_names(self.spec)
        self.shapes = {name: (outputs, inputs) for name, (_, outputs, inputs) in matrices(self.spec).items()}
        if self.spec.latent is not None or not self.names.keys() >= self.shapes.keys():
            raise UserError(
                f"files of {self.spec.family} models stack or transpose matrices, or hold experts or latent attention, "
                "which are not factored; take another method"
            )
        numbers = sum(outputs * inputs for outputs, inputs in self.shapes.values())
        least = sum(map(sum, self.shapes.values())) / numbers
        if self.job.keep < least:
            raise UserError(f"--keep is {self.job.keep}, but factors of rank one already keep {least:.4f}; give more")

    def prepare(self) -> list[int]:
        """The rank of every matrix, from the singular values of all layers."""
        energies: dict[str, list[float]] = {}
        stream = self.calibration.embedded(self.parts.embedding())
        for index in range(self.spec.layers):
            model = self.parts.layer(index)
            for group in linear_sets(self.spec, index):
                seen = self._seen(model, index, group.names[0], stream)
                for name in group.names:
                    weight = linear(layer_of(model, index), name).weight.detach()
                    energies[f"layers.{index}.{name}"] = singular_energies(weight, self._moment(seen)).tolist()
            stream = through(model, index, stream)
        self.ranks = choose_ranks(energies, self.shapes, self.job.keep)
        return list(range(self.spec.layers))

    def _moment(self, seen: InputStatistics) -> Tensor | None:
        return seen.hessian if self.job.method == "whitened" else None

    def _seen(self, model: Decoder, index: int, name: str, stream: list[Tensor]) -> InputStatistics:
        with torch.no_grad():
            return observe(model, layer_of(model, index), stream, [name], stop=True)[name]

    def written_spec(self) -> ModelSpec:
        return self.spec

    def changed_config(self, config: dict[str, Any]) -> dict[str, Any]:
        return low_rank_config(config, {self.names[ours]: rank for ours, rank in self.ranks.items()})

    def more_files(self) -> dict[str, str]:
        return {MODELLING_FILE: modelling_code(self.spec)}

    def result_bytes(self) -> int:
        saved = sum(
            self.shapes[name][0] * self.shapes[name][1] - rank * sum(self.shapes[name])
            for name, rank in self.ranks.items()
        )
        return 2 * (self.spec.params() - saved)

    def settings(self) -> dict[str, Any]:
        return {"method": self.job.method, "keep": self.job.keep}

    def method_name(self) -> str:
        return self.job.method

    def describe(self) -> str:
        mean = sum(self.ranks.values()) / max(len(self.ranks), 1)
        whole = len(self.shapes) - len(self.ranks)
        return f"{self.job.method} low rank: {self.job.keep:.0%} of the numbers, mean rank {mean:.0f}, {whole} whole"

    @torch.no_grad()
    def rewrite(self, model: Decoder, new: int, old: int, stream: list[Tensor]) -> Rewritten:
        layer = layer_of(model, old)
        factors: dict[str, Factors] = {}
        errors: dict[str, float] = {}
        for group in linear_sets(self.spec, old):
            seen = self._seen(model, old, group.names[0], stream)
            for name in group.names:
                ours = f"layers.{old}.{name}"
                if ours not in self.ranks:
                    continue
                module = linear(layer, name)
                before = module.weight.clone()
                factors[ours] = factor(before, self.ranks[ours], self._moment(seen))
                module.weight.copy_(factors[ours].product)
                lost = output_error(module.weight - before, seen.hessian)
                errors[name] = lost / max(output_error(before, seen.hessian), 1e-30)
        return Rewritten(self._tensors(model, old, factors), errors, through(model, old, stream))

    def _tensors(self, model: Decoder, index: int, factors: dict[str, Factors]) -> dict[str, Tensor]:
        """The layer's tensors by Hugging Face's names: a factored module has two weights, the second with its bias."""
        state = {f"layers.{index}.{name}": tensor for name, tensor in layer_of(model, index).state_dict().items()}
        tensors = tensors_to_write(self.spec, state, {}, Own(), PLAIN_DTYPE)
        for ours, found in factors.items():
            module = self.names[ours]
            del tensors[f"{module}.weight"]
            tensors[f"{module}.0.weight"] = found.first.to("cpu", PLAIN_DTYPE).contiguous()
            tensors[f"{module}.1.weight"] = found.second.to("cpu", PLAIN_DTYPE).contiguous()
            if f"{module}.bias" in tensors:
                tensors[f"{module}.1.bias"] = tensors.pop(f"{module}.bias")
        return tensors

    def load(self, new: int) -> Decoder:
        tensors = dict(self.directory.tensors(new + LAYER_SHARDS))
        for ours in (name for name in self.ranks if name.startswith(f"layers.{new}.")):
            module = self.names[ours]
            first, second = tensors.pop(f"{module}.0.weight"), tensors.pop(f"{module}.1.weight")
            tensors[f"{module}.weight"] = second.float() @ first.float()
            if f"{module}.1.bias" in tensors:
                tensors[f"{module}.bias"] = tensors.pop(f"{module}.1.bias")
        return load_finished(tensors, new, self.spec, Own(), {}, self.device)
