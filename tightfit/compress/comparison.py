"""A compressed model beside the original: loss, perplexity, KL divergence and agreement, with confidence intervals.

Both read the same rows. Per counted token, with p the original's distribution and q the compressed one's:

    loss = −log q(next)      KL = Σ p · log(p / q)      agreement = whether the likeliest token is the same

Tokens of a row are not independent, so intervals are over rows: mean ± 1.96 · σ(row means) / √rows. The difference of
the losses has an interval of its own, much narrower than that of either loss, as both see the same text.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.loss.linear_cross_entropy import IGNORE
from tightfit.models.decoder import Decoder
from tightfit.models.generate import NOT_FINITE
from tightfit.models.loading import find_source_tokenizer, load_model, source_spec
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.train.data.dataset import PackedText
from tightfit.train.data.loader import evaluation_batches
from tightfit.train.data.shards import prepare_text
from tightfit.train.progress import followed

NORMAL_95 = 1.96
DEFAULT_LENGTH = 2048
CHUNK_LOGITS = 2**26
"""Logits of each model that are in memory at a time."""


@dataclass(frozen=True)
class Interval:
    """A mean over rows and half the width of its 95 % confidence interval; None with a single row."""

    mean: float
    half_width: float | None


@dataclass(frozen=True)
class Comparison:
    """Metrics of the compressed model (`loss`) and the original, over `tokens` tokens in `rows` rows."""

    loss: Interval
    original_loss: Interval
    loss_difference: Interval
    kl: Interval
    agreement: Interval
    rows: int
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss) of the compressed model."""
        return math.exp(min(self.loss.mean, 700.0))

    @property
    def original_perplexity(self) -> float:
        """exp(loss) of the original."""
        return math.exp(min(self.original_loss.mean, 700.0))


class _Rows:
    """Sums of one quantity, row by row."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.counts: list[Tensor] = []

    def add(self, values: Tensor, counted: Tensor) -> None:
        self.sums.append((values * counted).sum(-1).double().cpu())
        self.counts.append(counted.sum(-1).double().cpu())

    def interval(self) -> Interval:
        sums, counts = torch.cat(self.sums), torch.cat(self.counts)
        sums, counts = sums[counts > 0], counts[counts > 0]
        mean = float(sums.sum() / counts.sum())
        if len(counts) < 2:
            return Interval(mean, None)
        # rows weigh by their tokens: the ratio estimator's deviation
        deviation = float(((sums - mean * counts).square().sum() / (len(counts) - 1)).sqrt() / counts.mean())
        return Interval(mean, NORMAL_95 * deviation / len(counts) ** 0.5)


@torch.no_grad()
def hidden_states(model: Decoder, batches: Iterable[dict[str, Tensor]]) -> list[Tensor]:
    """Normed hidden states [B, T, H] of every batch, to compare several models with one pass of the original."""
    device = next(model.parameters()).device
    return [_hidden(model, {name: tensor.to(device) for name, tensor in batch.items()}) for batch in batches]


@torch.no_grad()
def compare_models(
    compressed: Decoder,
    original: Decoder,
    batches: Iterable[dict[str, Tensor]],
    original_states: Sequence[Tensor] | None = None,
) -> Comparison:
    """Compare both models on batches of tokens, labels and documents.

    `original_states` are `hidden_states` of the original, where they are known already.
    """
    device = next(compressed.parameters()).device
    loss, other, difference, kl, agreement = (_Rows() for _ in range(5))
    rows = tokens = 0
    for number, batch in enumerate(batches):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        counted = (batch["labels"] != IGNORE).double()
        known = _hidden(original, batch) if original_states is None else original_states[number]
        values_per_token = _per_token(compressed, original, batch, known)
        for collected, values in zip((loss, other, kl, agreement), values_per_token, strict=True):
            collected.add(values, counted)
        difference.add(values_per_token[0] - values_per_token[1], counted)
        rows, tokens = rows + len(counted), tokens + int(counted.sum())
    return Comparison(
        loss=loss.interval(),
        original_loss=other.interval(),
        loss_difference=difference.interval(),
        kl=kl.interval(),
        agreement=agreement.interval(),
        rows=rows,
        tokens=tokens,
    )


def _per_token(
    compressed: Decoder, original: Decoder, batch: dict[str, Tensor], known: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses of both, KL divergence and agreement of every token, [B, T]; a chunk of logits at a time."""
    hidden = _hidden(compressed, batch)
    labels = batch["labels"].clamp(min=0)
    step = max(CHUNK_LOGITS // (compressed.spec.vocab_size * len(labels)), 1)
    parts = []
    for i in range(0, labels.shape[1], step):
        q = log_probabilities(compressed, hidden[:, i : i + step])
        p = log_probabilities(original, known[:, i : i + step])
        parts.append(_compared(q, p, labels[:, i : i + step]))
    losses, others, divergences, agreements = (torch.cat(found, 1) for found in zip(*parts, strict=True))
    return losses, others, divergences, agreements


def _compared(q: Tensor, p: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    index = labels[..., None]
    same = (q.argmax(-1) == p.argmax(-1)).double()
    return -q.gather(-1, index)[..., 0], -p.gather(-1, index)[..., 0], (p.exp() * (p - q)).sum(-1), same


def _hidden(model: Decoder, batch: dict[str, Tensor]) -> Tensor:
    """Normed hidden states [B, T, H]."""
    positions = model.token_positions(batch["tokens"], batch["documents"], None)
    x = model.embed_tokens(batch["tokens"], positions)
    around = model.forward_context(x, positions, batch["documents"], None)
    for layer in model.layers:
        x, _ = layer(x, around)
    normed: Tensor = model.norm(x)
    return normed


def log_probabilities(model: Decoder, x: Tensor) -> Tensor:
    """Log-probabilities of the next token [..., vocabulary], from normed hidden states `x`, in float32."""
    logits: Tensor = model.head(x).float()
    if (cap := model.spec.logit_softcap) is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits.log_softmax(-1)


def compare_sources(
    compressed: str,
    original: str,
    data: Sequence[str],
    *,
    field: str = "text",
    sequence_length: int | None = None,
    batch: int = 4,
    cache: Path,
    device: torch.device,
    progress: bool = False,
) -> Comparison:
    """Compare the models at two sources on the text of `data`, which is read before the models are loaded."""
    specs = {source: source_spec(source) for source in (compressed, original)}
    tokenizer = _one_tokenizer(specs)
    positions = min(spec.max_positions for spec in specs.values())
    length = min(positions, DEFAULT_LENGTH) if sequence_length is None else sequence_length
    if length > positions:
        raise UserError(f"sequence length {length} is more than the {positions} positions of the models; shorten it")
    vocab_size = specs[original].vocab_size
    store = prepare_text(data, tokenizer, cache_dir=cache, vocab_size=vocab_size, field=field, progress=progress)
    rows = PackedText(store, length)
    small, known = (load_model(source, device=device).model for source in (compressed, original))
    batches = followed(evaluation_batches(rows, batch), -(-len(rows) // batch), what="evaluating", shown=progress)
    found = compare_models(small, known, batches)
    for source, loss in ((original, found.original_loss.mean), (compressed, found.loss.mean)):
        if not math.isfinite(loss):
            raise UserError(f"the loss of {source} is {loss}: {NOT_FINITE}")
    return found


def _one_tokenizer(specs: Mapping[str, ModelSpec]) -> Tokenizer:
    """The tokenizer that all models share; `specs` are by source."""
    sources, sizes = list(specs), [spec.vocab_size for spec in specs.values()]
    if len(set(sizes)) > 1:
        told = " and ".join(map(str, sizes))
        raise UserError(f"{' and '.join(sources)} have vocabularies of {told}; they cannot be compared")
    found = {source: tokenizer for source in sources if (tokenizer := find_source_tokenizer(source)) is not None}
    if not found:
        raise UserError(f"neither {' nor '.join(sources)} has a tokenizer, so text cannot become tokens")
    *others, tokenizer = found.values()
    for other in others:
        if (token := _first_difference(other, tokenizer)) is not None:
            raise UserError(
                f"token {token} of {' and of '.join(sources)} are different texts; models of different "
                "tokenizers cannot be compared token by token"
            )
    return tokenizer


def _first_difference(one: Tokenizer, other: Tokenizer) -> int | None:
    """The first token whose text differs between the two; special tokens may have been renamed and do not count."""
    shared = set(range(min(one.vocab_size, other.vocab_size))) - one.special_tokens.keys() - other.special_tokens.keys()
    return next((token for token in sorted(shared) if one.token_bytes(token) != other.token_bytes(token)), None)
