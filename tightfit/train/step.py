"""One optimizer step: gradient accumulation over micro-batches, clipping, update.

The loss is summed over tokens and divided by the counted tokens of the whole step, known before the first forward: the
same as one big batch. (A mean of per-micro-batch means gives tokens of short rows more weight, a common bug.)

Under pipeline parallelism every rank has an optimizer of its own parameters. Only the last stage knows the loss, and
Σ g² is a sum over stages, so both are summed over all processes: every rank clips by the same norm and stops at the
same loss.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit.kernels.loss.linear_cross_entropy import IGNORE
from tightfit.kernels.mapped_copy import sent
from tightfit.kernels.optimizer.clip_estimate import clip_factor
from tightfit.levers.side_stream import HostCopy
from tightfit.memory.ledger import Phase
from tightfit.models.decoder import Decoder, DecoderOutput
from tightfit.parallel.data import micro_batch
from tightfit.parallel.expert import sum_expert_gradients
from tightfit.parallel.pipeline import Pipeline
from tightfit.parallel.ranks import ALONE, Ranks
from tightfit.parallel.tensor import sum_partial_gradients
from tightfit.train.expert_load import correct_choices
from tightfit.train.optimizer.adamw import MasterAdamW, global_norm
from tightfit.train.optimizer.backward_update import BackwardUpdate
from tightfit.train.precision import LossScale

if TYPE_CHECKING:  # step_graph.py imports this file
    from tightfit.train.step_graph import StepGraph

Batch = dict[str, Tensor]
OnPhase = Callable[[Phase], None]
"""Called at the start of each phase of a step."""


def ignore(phase: Phase) -> None:
    """The default OnPhase: does nothing."""


@dataclass(frozen=True)
class StepResult:
    """Mean loss over counted tokens, gradient norm before clipping, whether fp16 overflow skipped the update."""

    loss: float
    gradient_norm: float
    tokens: int
    skipped: bool


class NotFiniteError(ArithmeticError):
    """Loss or gradients are NaN or infinite; the weights are unchanged unless `weights_changed`."""

    def __init__(self, message: str, *, weights_changed: bool = False) -> None:
        super().__init__(message)
        self.weights_changed = weights_changed


def accumulate(
    model: nn.Module,
    batches: Sequence[Batch],
    device: torch.device,
    scale: float = 1.0,
    on_phase: OnPhase = ignore,
    ranks: Ranks = ALONE,
    *,
    check_first: bool = False,
    graph: "StepGraph | None" = None,
) -> tuple[Tensor, int | Tensor]:
    """Forward and backward of this rank's micro-batches.

    Returns this rank's part of the step's mean loss, on the device, and the counted tokens of the step over all ranks
    (on the device where there are several). `check_first` waits for the loss before backward and raises NotFiniteError,
    for updates that happen inside backward. With `graph` micro-batches are replayed as CUDA graphs where possible.
    """
    counted, tokens, total = counted_labels(batches, device, ranks)
    if isinstance(model, Pipeline):
        return model.run([inputs(batch, device) for batch in batches], counted, total, scale, on_phase), tokens
    if graph is not None and isinstance(total, int):
        on_phase("forward")
        replayed = graph.run(batches, counted, total, scale)
        if replayed is not None:
            return replayed, tokens
    mean = torch.zeros((), device=device)
    for number, (batch, count) in enumerate(zip(batches, counted, strict=True), 1):
        with micro_batch(model, last=number == len(batches)):
            on_phase("forward")
            output = model(**inputs(batch, device), divisor=total)
            mean += output.loss.detach()
            if check_first:
                require_finite(HostCopy(ranks.sum_over_batch(mean), beside_link=True).read())
            on_phase("backward")
            (objective(output, count / total) * scale).backward()
    sum_partial_gradients(decoder_of(model))
    sum_expert_gradients(decoder_of(model))
    return mean, tokens


def objective(output: DecoderOutput, share: float | Tensor) -> Tensor:
    """loss + share · auxiliary, where a micro-batch's backward begins; `share` is its share of the step's tokens."""
    assert output.loss is not None
    return output.loss if output.auxiliary is None else output.loss + output.auxiliary * share


def counted_labels(
    batches: Sequence[Batch], device: torch.device, ranks: Ranks
) -> tuple[list[int], int | Tensor, int | Tensor]:
    """Counted tokens of each micro-batch, counted tokens of the step over all ranks, and the divisor of its loss."""
    counted = [int((batch["labels"] != IGNORE).sum()) for batch in batches]
    tokens = sum(counted) if ranks.world == 1 else ranks.sum(torch.tensor(sum(counted), device=device))
    return counted, tokens, max(tokens, 1) if isinstance(tokens, int) else tokens.clamp(min=1)


def decoder_of(model: nn.Module) -> Decoder:
    """The decoder inside DDP, or the model itself."""
    decoder = getattr(model, "module", model)
    assert isinstance(decoder, Decoder)
    return decoder


def inputs(batch: Batch, device: torch.device) -> dict[str, Tensor | None]:
    """The decoder's arguments; `documents` is None where every row is one document: plain causal attention."""
    documents = batch.get("documents")
    if documents is not None and bool((documents == documents[:, :1]).all()):
        documents = None
    tensors = {"tokens": batch["tokens"], "labels": batch["labels"], "documents": documents}
    return {name: None if t is None else sent(t, device) for name, t in tensors.items()}


def train_step(
    model: nn.Module,
    optimizer: MasterAdamW,
    batches: Sequence[Batch],
    device: torch.device,
    lr: float,
    scale: LossScale,
    on_phase: OnPhase = ignore,
    ranks: Ranks = ALONE,
    graph: "StepGraph | None" = None,
) -> StepResult:
    """Forward and backward over this rank's `batches`, then one update.

    Raises NotFiniteError on all ranks alike, before weights change.
    """
    if optimizer.engine is not None:
        return optimizer.engine.train_step(batches, device, lr, scale, on_phase, ranks)
    if optimizer.buffered is not None:
        return optimizer.buffered.take_alone(batches, device, lr, on_phase, ranks)
    if optimizer.in_backward is not None:
        return _step_in_backward(model, optimizer.in_backward, batches, device, lr, on_phase, ranks, graph)
    part, tokens = accumulate(model, batches, device, scale.value, on_phase, ranks, graph=graph)
    on_phase("optimizer")
    mean, norm = _over_all_ranks(part, optimizer, ranks)
    norm = norm / scale.value
    factor = gradient_factor(norm, optimizer.settings.clip_norm, scale.value)
    known = [mean, norm] if isinstance(tokens, int) else [mean, norm, tokens]
    told = HostCopy(torch.stack([x.double() for x in known]), beside_link=True)
    launched = optimizer.skips_nan
    if launched:  # the GPU goes on with the update while the host waits for the loss
        optimizer.step(lr, _nan_unless_finite(factor, mean, norm))
    loss_value, norm_value, *counted = told.read()  # the only wait of a step
    overflowed = not math.isfinite(norm_value)
    if launched and (overflowed or not math.isfinite(loss_value)):
        optimizer.uncount_step()
    require_finite(loss_value)
    if overflowed and (not scale.dynamic or scale.exhausted):
        raise NotFiniteError(f"the gradient norm is {norm_value}")
    if overflowed:
        optimizer.drop_gradients()
    else:
        if not launched:
            optimizer.step(lr, factor)
        correct_choices(model.decoder if isinstance(model, Pipeline) else decoder_of(model), ranks)
    scale.update(overflowed=overflowed)
    return StepResult(loss_value, norm_value, int(counted[0]) if counted else int(tokens), skipped=overflowed)


def _nan_unless_finite(factor: Tensor | None, *values: Tensor) -> Tensor:
    """`factor` where all of `values` are finite, else NaN, for which updates change nothing."""
    finite = torch.stack([value.isfinite() for value in values]).all()
    return torch.where(finite, values[0].new_ones((), dtype=torch.float32) if factor is None else factor, torch.nan)


def require_finite(loss: float) -> None:
    """Raise NotFiniteError where `loss` is NaN or infinite."""
    if not math.isfinite(loss):
        raise NotFiniteError(f"the loss is {loss}")


def _step_in_backward(
    model: nn.Module,
    updates: BackwardUpdate,
    batches: Sequence[Batch],
    device: torch.device,
    lr: float,
    on_phase: OnPhase,
    ranks: Ranks,
    graph: "StepGraph | None",
) -> StepResult:
    """A step whose weights are updated during backward (backward_update.py)."""
    assert len(batches) == 1, "an update inside backward needs the whole batch in one backward"
    replayed: tuple[float, float, int | Tensor] | None = None
    if graph is not None:
        on_phase("forward")
        replayed = graph.update(batches[0], lr)
    if replayed is not None:
        loss, norm, tokens = replayed
    else:
        updates.begin(lr)
        mean, tokens = accumulate(model, batches, device, on_phase=on_phase, ranks=ranks, check_first=True)
        on_phase("optimizer")
        told = HostCopy(torch.stack([ranks.sum_over_batch(mean), updates.finish()]), beside_link=True)
        loss, norm = told.read()
    correct_choices(decoder_of(model), ranks)
    if not math.isfinite(norm):
        raise NotFiniteError(f"the gradient norm is {norm}", weights_changed=True)
    return StepResult(loss, norm, int(tokens), skipped=False)


def _over_all_ranks(part: Tensor, optimizer: MasterAdamW, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """The step's loss and gradient norm, from this rank's `part` of the loss.

    Data and context ranks have parts of the loss, tensor ranks the same value; gradients may be replicated.
    """
    if ranks.processes == 1:
        assert optimizer.is_whole or dist.get_world_size() == 1, "sharded parameters need `ranks`"
        return part, global_norm(optimizer.gradients)
    optimizer.sum_extra_gradients(ranks)
    mean, squares = ranks.sum_over_all(loss_and_squares(part, optimizer, ranks)).unbind()
    return mean.float(), squares.sqrt().float()


def loss_and_squares(part: Tensor, optimizer: MasterAdamW, ranks: Ranks) -> Tensor:
    """This rank's parts of the step's loss and of Σ g², to be summed over all processes."""
    ranks_per_stage = ranks.processes // optimizer.pipeline_ranks
    copies = ranks_per_stage // (ranks.world * ranks.context_ranks)
    return torch.stack([part.double() / copies, optimizer.squares(ranks_per_stage)])


def gradient_factor(norm: Tensor, clip_norm: float, scale: float) -> Tensor | None:
    """The gradient factor of clipping and loss unscaling together; None for 1."""
    if not clip_norm:
        return None if scale == 1.0 else torch.full_like(norm, 1 / scale)
    return clip_factor(norm, clip_norm) / scale
