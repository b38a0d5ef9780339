"""Codes of GGUF blocks chosen as GPTQ chooses them: each column's error is made up for by the columns that follow.

llama.cpp rounds every weight of a block to its nearest code; with an importance matrix it fits the block's scales to
the inputs that matter. The file does not say how codes were chosen, so they may as well be chosen for the layer's
outputs: scales are fitted first, as before, and columns are then rounded in the order of their importance with errors
passed on (gptq.py). Layers are done in order, each on inputs that came through those already coded. Experts and the
ends of the model, whose inputs are not observed, are rounded to nearest.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tightfit.compress.calibration.calibration import Calibration
from tightfit.compress.calibration.observation import layer_of, observe, through
from tightfit.compress.gguf.gguf_blocks import CODERS, fit_rows, pack_rows
from tightfit.compress.linear_sets import linear_sets
from tightfit.compress.model_parts import ModelParts
from tightfit.compress.rounding.column_rounding import ColumnBlock, round_columns
from tightfit.compress.rounding.gptq import inverse_factor, without_dead
from tightfit.compress.rounding.moving_scales import linear
from tightfit.models.decoder import Decoder
from tightfit.models.quantized.scheme import Scheme
from tightfit.train.progress import followed

DAMPING = 0.01
BLOCK = 128
SMALLEST_SCALE = 1e-20
"""In place of zero, so that a block of zeros can be divided by it; its codes do not matter."""

KindOf = Callable[[str, tuple[int, ...]], str]
"""The GGUF type of a parameter by name and shape."""
Blocks = dict[str, Tensor]
"""Rows of blocks (uint8) by parameter name."""


def encode_with_feedback(weight: Tensor, kind: str, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of blocks (uint8) of a float32 matrix whose inputs have second moment `hessian`; the matrix dequantized."""
    fitted = fit_rows(weight, kind, hessian.diagonal())
    scale, offset = fitted.scale.reshape(weight.shape), fitted.offset.reshape(weight.shape)
    scale = torch.where(scale == 0, torch.full_like(scale, SMALLEST_SCALE), scale)
    codes = _round_all(
        weight, hessian, scale, -offset / scale, Scheme(bits=CODERS[kind].bits, group=0, symmetric=False)
    )
    rounded = codes * fitted.scale.reshape(weight.shape) + offset
    return pack_rows(fitted, codes.reshape(fitted.scale.shape), kind, weight.shape), rounded


def _round_all(weight: Tensor, hessian: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme) -> Tensor:
    """GPTQ's codes with `scale` and `zero` given for every weight; columns in order of falling importance."""
    left, hessian = without_dead(weight, hessian)
    order = hessian.diagonal().argsort(descending=True, stable=True)
    upper = inverse_factor(hessian[order[:, None], order], DAMPING)
    left, codes = left[:, order], torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for start in range(0, weight.shape[1], BLOCK):
        here = slice(start, min(start + BLOCK, weight.shape[1]))
        at = order[here]
        block = ColumnBlock(
            weight=left[:, here], upper=upper[here, here], scale=scale[:, at], zero=zero[:, at], pruned=None
        )
        codes[:, at], errors = round_columns(block, scheme)
        left[:, here.stop :] -= errors @ upper[here, here.stop :]
    return codes


@torch.no_grad()
def code_layer(model: Decoder, index: int, inputs: list[Tensor], kind_of: KindOf) -> tuple[Blocks, list[Tensor]]:
    """Blocks of the linear layers of layer `index` by the names of their weights, and the layer's new outputs."""
    layer = layer_of(model, index)
    coded: Blocks = {}
    for group in linear_sets(model.spec, index):
        hessian = observe(model, layer, inputs, [group.names[0]], stop=True)[group.names[0]].hessian
        for own in group.names:
            module, name = linear(layer, own), f"layers.{index}.{own}.weight"
            kind = kind_of(name, tuple(module.weight.shape))
            if kind in CODERS:
                coded[name], rounded = encode_with_feedback(module.weight.float(), kind, hessian)
                module.weight.copy_(rounded)
    return coded, through(model, index, inputs)


@torch.no_grad()
def code_layers(
    source: str, calibration: Calibration, device: torch.device, kind_of: KindOf, *, progress: bool = False
) -> Blocks:
    """Blocks of every linear layer of the model at `source`, on the host; one layer in memory at a time."""
    parts, found = ModelParts(source, device), Blocks()
    stream = calibration.embedded(parts.embedding())
    layers = parts.spec.layers
    for index in followed(range(layers), layers, what="coding layers", shown=progress):
        coded, stream = code_layer(parts.layer(index), index, stream, kind_of)
        found |= {name: blocks.cpu() for name, blocks in coded.items()}
    return found
