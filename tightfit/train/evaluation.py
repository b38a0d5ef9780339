"""Held-out loss: summed over counted tokens, divided by their number, whatever the batch size."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tightfit.errors import UserError
from tightfit.kernels.loss.linear_cross_entropy import IGNORE
from tightfit.models.generate import NOT_FINITE
from tightfit.models.loading import load_model
from tightfit.parallel.data import reshard_all
from tightfit.parallel.ranks import ALONE, Ranks
from tightfit.train.data.dataset import PackedChats, PackedText
from tightfit.train.data.loader import evaluation_batches
from tightfit.train.data.shards import prepare_chats, prepare_text
from tightfit.train.inference_precision import InferencePrecision, inference_dtype
from tightfit.train.precision import choose_device
from tightfit.train.progress import followed
from tightfit.train.step import Batch, inputs

DEFAULT_LENGTH = 2048


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per token over `tokens` counted tokens."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], device: torch.device, ranks: Ranks = ALONE) -> Evaluation:
    """The loss of `model` over all `batches` of all ranks; every rank must have the same number of batches."""
    total = torch.zeros((), device=device, dtype=torch.float64)
    tokens = 0
    for batch in batches:
        output = model(**inputs(batch, device))
        assert output.loss is not None
        total += output.loss
        tokens += int((batch["labels"] != IGNORE).sum())
    reshard_all(model)
    total = ranks.sum_over_context_ranks(total)
    loss, counted = ranks.sum(torch.stack([total, torch.full_like(total, tokens)])).tolist()
    return Evaluation(loss / max(counted, 1), int(counted))


def evaluate_source(
    source: str,
    data: Sequence[str],
    *,
    field: str = "text",
    chat: bool = False,
    sequence_length: int | None = None,
    batch: int = 4,
    cache: Path,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    precision: InferencePrecision = "auto",
    progress: bool = False,
    verified: bool = True,
) -> Evaluation:
    """The loss of the model at `source` over the text of `data`; of a `chat`, over what the assistant says."""
    target = choose_device(device)
    dtype = inference_dtype(source, precision, target)
    loaded = load_model(source, device=target, dtype=dtype, verified=verified)
    positions = loaded.model.spec.max_positions
    length = min(positions, DEFAULT_LENGTH) if sequence_length is None else sequence_length
    if length > positions:
        raise UserError(f"sequence length {length} is more than the {positions} positions of {source}; shorten it")
    if loaded.tokenizer is None:
        raise UserError(f"{source} has no tokenizer, so text cannot be turned into its tokens")
    options: dict[str, Any] = {
        "cache_dir": cache,
        "vocab_size": loaded.model.spec.vocab_size,
        "progress": progress,
    }
    rows: PackedText | PackedChats
    if chat:
        rows = PackedChats(prepare_chats(data, loaded.tokenizer, **options), length)
    else:
        rows = PackedText(prepare_text(data, loaded.tokenizer, field=field, **options), length)
    batches = followed(evaluation_batches(rows, batch), -(-len(rows) // batch), what="evaluating", shown=progress)
    found = evaluate(loaded.model, batches, target)
    if not math.isfinite(found.loss):
        raise UserError(f"the loss of {source} is {found.loss}: {NOT_FINITE}")
    return found
