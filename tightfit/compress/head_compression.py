"""The output projection coded, some rows at a time, and its codes as they were written.

It is coded last, when the calibration rows have come through all coded layers. It is the largest matrix of most models,
so rows are coded in pieces: every method takes several float32 copies of what it codes, and none needs other rows.
All rows have the same inputs, whose second moment is inverted once.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.compress.calibration.inputs import InputStatistics
from tightfit.compress.layer_compression import code_weight
from tightfit.compress.memory import HEAD_ROWS
from tightfit.compress.recipe import CALIBRATED, Step
from tightfit.compress.rounding.gptq import GptqOptions, InverseFactor, moment_without_dead
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.weight_names import HEAD_MODULE
from tightfit.models.quantized.coded_weight import CodedWeight, stack_rows
from tightfit.models.quantized.formats.format import FileFormat
from tightfit.models.quantized.matrices import HEAD


@torch.no_grad()
def code_head(model: Decoder, stream: Sequence[Tensor], step: Step) -> tuple[CodedWeight, float]:
    """The codes of the output projection [V, H] of `model`, and its relative error (as LayerResult has it of matrices);
    `stream` are outputs [B, T, H] of the last layer."""
    weight, seen = model.head.weight, None
    if stream:
        seen = InputStatistics(model.spec.hidden_size, weight.device)
        for x in stream:
            seen.add(model.norm(x))
    used = seen if step.method in CALIBRATED else None
    factor = None if used is None else _factor(used, step)
    pieces, lost, whole = [], 0.0, 0.0
    for piece in (rows.float() for rows in weight.split(HEAD_ROWS)):
        pieces.append(code_weight(HEAD, piece, used, step, factor=factor))
        lost += _size(pieces[-1].dequantize().sub_(piece), seen)
        whole += _size(piece, seen)
    return stack_rows(pieces, HEAD), lost / max(whole, 1e-30)


def _factor(seen: InputStatistics, step: Step) -> InverseFactor:
    """What GPTQ, the one calibrated method of a projection, makes of the inputs of all pieces."""
    options = GptqOptions(act_order=step.act_order, damping=step.damping)
    return InverseFactor.of(moment_without_dead(seen.hessian), options)


def _size(weight: Tensor, seen: InputStatistics | None) -> float:
    """The mean square of the outputs of `weight`, summed over them; of its numbers where no inputs were seen."""
    if seen is None:
        return float(weight.square().sum())
    return float((weight @ seen.hessian).mul_(weight).sum())


@torch.no_grad()
def with_codes(model: Decoder, tensors: Mapping[str, Tensor], form: FileFormat, config: Mapping[str, Any]) -> Decoder:
    """A copy of `model`, which has a final norm and an output projection only, whose projection is that in the
    `tensors` of a file."""
    own = {suffix: tensors[name] for suffix in form.suffixes if (name := f"{HEAD_MODULE}.{suffix}") in tensors}
    weight = form.decode(own, form.scheme(config, HEAD_MODULE), HEAD_MODULE).dequantize()
    other: Decoder = _apart(model)
    other.head = _apart(model.head)
    other.head.weight = nn.Parameter(weight.to(model.head.weight.device), requires_grad=False)
    return other


def _apart(module: Any) -> Any:
    """A copy of a module whose parts can be replaced; those that are not are shared."""
    other = copy(module)
    other._modules, other._parameters = dict(module._modules), dict(module._parameters)
    return other
