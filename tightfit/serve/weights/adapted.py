"""AdaptedWeight: quantized matrices, and the LoRA adapters of a run over them.

    y = W x + b, and rows of y that have an adapter get B (A x)

The A's of the joined layers stand one above the other and are one product; each B's product is added to its own rows of
y. For runs that trained adapters over packed weights; forward/adapters.py has those that requests choose by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.models.layers.linear_plus_adapter import LinearPlusAdapter
from tightfit.serve.weights.weight import Weight


class AddedRows(NamedTuple):
    """B of one layer, which outputs of the joint product it is added to, and which rows of the joint A are its own."""

    outputs: slice
    low: slice
    up: Tensor


@dataclass(frozen=True, eq=False)
class AdaptedWeight(Weight):
    """The joint quantized matrix, the joint A [r, K], and the B's."""

    base: Weight
    down: Tensor
    added: tuple[AddedRows, ...]

    def product(self, x: Tensor) -> Tensor:
        y, low = self.base.product(x), F.linear(x, self.down)
        for part in self.added:
            y[:, part.outputs].addmm_(low[:, part.low], part.up.T)
        return y


def with_adapters(base: Weight, linears: Sequence[nn.Module]) -> Weight:
    """`base`, the joint weight of `linears`, with the adapters that some of them have.

    The layers' A's become views of the joint one, so that nothing is held twice.
    """
    adapted = [layer for layer in linears if isinstance(layer, LinearPlusAdapter)]
    if not adapted:
        return base
    downs = {id(layer.down): layer.down for layer in adapted}
    joint = torch.cat(list(downs.values())) if len(downs) > 1 else adapted[0].down
    ends = list(accumulate(map(len, downs.values()), initial=0))
    places = dict(zip(downs, starmap(slice, pairwise(ends)), strict=True))
    views = {key: joint[place] for key, place in places.items()}
    added, output = [], 0
    for layer in linears:
        end = output + int(layer.out_features)  # type: ignore[arg-type]
        if isinstance(layer, LinearPlusAdapter):
            key = id(layer.down)
            added.append(AddedRows(slice(output, end), places[key], layer.up))
            layer.down = views[key]
        output = end
    return AdaptedWeight(base, joint, tuple(added))
