"""One optimizer step: accumulate over micro-batches exactly as one big batch would, clip, update.

The loss is summed over tokens and divided by the number of counted tokens of the whole step, known before the first
forward. (A mean of per-micro-batch means weighs tokens of short rows more, the bug of many accumulation loops.)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.kernels.linear_cross_entropy import IGNORE
from tightfit.memory.ledger import Phase
from tightfit.models.decoder import Decoder
from tightfit.train.optimizer import MasterAdamW, clip_factor, global_norm
from tightfit.train.precision import LossScale

Batch = dict[str, Tensor]
OnPhase = Callable[[Phase], None]
"""Told where a step is, just before it gets there."""


def ignore(phase: Phase) -> None:
    """Nobody asked."""


@dataclass(frozen=True)
class StepResult:
    """Mean loss over counted tokens, gradient norm before clipping, and whether fp16 overflow skipped the update."""

    loss: float
    gradient_norm: float
    tokens: int
    skipped: bool


class NotFiniteError(ArithmeticError):
    """Loss or gradients are NaN or infinite; the weights are still those of the step before."""


def accumulate(
    model: Decoder, batches: Sequence[Batch], device: torch.device, scale: float = 1.0, on_phase: OnPhase = ignore
) -> tuple[Tensor, int]:
    """Backward through every micro-batch; returns the step's mean loss (on the device) and its counted tokens."""
    counted = [int((batch["labels"] != IGNORE).sum()) for batch in batches]
    total = max(sum(counted), 1)
    experts = model.spec.experts
    mean = torch.zeros((), device=device)
    for batch, count in zip(batches, counted, strict=True):
        on_phase("forward")
        output = model(**inputs(batch, device))
        assert output.loss is not None
        loss = output.loss / total
        mean += loss.detach()
        if experts is not None and output.balance is not None:
            loss = loss + experts.balance_weight * output.balance * (count / total)
        on_phase("backward")
        (loss * scale).backward()
    return mean, sum(counted)


def inputs(batch: Batch, device: torch.device) -> dict[str, Tensor | None]:
    """The decoder's arguments; documents are left out where every row is a single one, which keeps attention plain."""
    documents = batch.get("documents")
    if documents is not None and bool((documents == documents[:, :1]).all()):
        documents = None
    tensors = {"tokens": batch["tokens"], "labels": batch["labels"], "documents": documents}
    return {name: None if t is None else t.to(device, non_blocking=True) for name, t in tensors.items()}


def train_step(
    model: Decoder,
    optimizer: MasterAdamW,
    batches: Sequence[Batch],
    device: torch.device,
    lr: float,
    scale: LossScale,
    on_phase: OnPhase = ignore,
) -> StepResult:
    """Forward and backward over `batches`, then one update. Raises NotFiniteError before touching the weights."""
    mean, tokens = accumulate(model, batches, device, scale.value, on_phase)
    on_phase("optimizer")
    norm = global_norm(optimizer.gradients) / scale.value
    loss_value, norm_value = torch.stack([mean, norm]).tolist()  # the step's only wait for the GPU
    if not math.isfinite(loss_value):
        raise NotFiniteError(f"the loss is {loss_value}")
    overflowed = not math.isfinite(norm_value)
    if overflowed and (not scale.dynamic or scale.exhausted):
        raise NotFiniteError(f"the gradient norm is {norm_value}")
    if overflowed:
        optimizer.drop_gradients()
    else:
        optimizer.step(lr, _factor(norm, optimizer.settings.clip_norm, scale.value))
    scale.update(overflowed=overflowed)
    return StepResult(loss_value, norm_value, tokens, skipped=overflowed)


def _factor(norm: Tensor, clip_norm: float, scale: float) -> Tensor | None:
    """Clipping and unscaling as one multiplication; None where there is nothing to multiply by."""
    if not clip_norm:
        return None if scale == 1.0 else torch.full_like(norm, 1 / scale)
    return clip_factor(norm, clip_norm) / scale
