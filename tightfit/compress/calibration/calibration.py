"""Calibration rows: some windows of the user's text, spread evenly over all of it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tightfit.compress.memory import BATCH_TOKENS
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.loading import load_source_tokenizer
from tightfit.models.spec import ModelSpec
from tightfit.train.data.dataset import PackedText
from tightfit.train.data.shards import prepare_text


@dataclass(frozen=True)
class Calibration:
    """Token rows [rows, length], and the name of their source for messages."""

    tokens: Tensor
    source: str

    def batches(self) -> list[Tensor]:
        """Rows in batches of about 8192 tokens."""
        return list(self.tokens.split(max(BATCH_TOKENS // self.tokens.shape[1], 1)))

    @torch.no_grad()
    def embedded(self, model: Decoder) -> list[Tensor]:
        """Embeddings [B, T, H] of every batch, the inputs of the first layer of `model`."""
        batches = [tokens.to(model.embed.weight.device) for tokens in self.batches()]
        return [model.embed_tokens(tokens, model.token_positions(tokens, None, None)) for tokens in batches]

    def describe(self) -> str:
        """Shape and source in a few words."""
        rows, length = self.tokens.shape
        return f"{rows} × {length} tokens of {self.source}"

    def fingerprint(self) -> str:
        """Shape and digest: equal where two runs calibrate on the same rows."""
        shape = " × ".join(map(str, self.tokens.shape))
        return f"{shape} {hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()[:16]}"


def refuse_long_rows(length: int, spec: ModelSpec) -> None:
    """Refuse rows longer than the model's positions."""
    if length > spec.max_positions:
        raise UserError(
            f"calibration rows of {length} tokens are longer than the model's {spec.max_positions} positions; shorten "
            "--seq"
        )


def read_calibration(
    model: str,
    spec: ModelSpec,
    data: Sequence[str],
    *,
    samples: int,
    length: int,
    cache: Path,
    field: str,
    progress: bool,
    remedy: str = "give more text or shorten --seq",
) -> Calibration:
    """`samples` windows of `length` tokens, spread evenly over the text in `data`; all windows where there are fewer.

    Text shorter than one window is refused, with `remedy` as the advice.
    """
    refuse_long_rows(length, spec)
    tokenizer = load_source_tokenizer(model)
    store = prepare_text(data, tokenizer, cache_dir=cache, vocab_size=spec.vocab_size, field=field, progress=progress)
    rows = PackedText(store, length, separate_documents=False)
    whole = (rows.tokens_total - 1) // length
    if whole == 0:
        raise UserError(f"{', '.join(data)} has {rows.tokens_total} tokens, less than one row of {length}; {remedy}")
    count = min(samples, whole)
    chosen = [rows[index * whole // count]["tokens"] for index in range(count)]
    return Calibration(torch.stack(chosen), ", ".join(data))
