"""The decoder cut by layers: a rank keeps its own and lets the others go; a stage runs one consecutive piece.

A cut decoder is a Decoder still, with the names it had (`layers.7.…` is layer 7 on whatever rank has it), so levers,
optimizers and checkpoints work on it as on a whole one. The first stage has the embedding, the last one the final norm,
the output projection and the loss. Where the embedding is tied to the projection, first and last stage hold a copy each
of the one weight, and pipeline.py adds their gradients up. Rope tables and masks are made anew by every stage: tokens
and documents are on all ranks anyway, and smaller than what would be sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tightfit.jobs.layout import Layout
from tightfit.memory.formulas.cut import cut
from tightfit.models.decoder import Decoder
from tightfit.models.spec import ModelSpec
from tightfit.parallel.tensor import even_share

Inputs = dict[str, Tensor | None]
"""A decoder's arguments for one micro-batch: tokens, labels and documents."""


@dataclass(frozen=True)
class Piece:
    """The layers [first, last) of the model as stage `index` of `stages`."""

    index: int
    stages: int
    first: int
    last: int

    @property
    def is_first(self) -> bool:
        """Whether the embedding is here."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether norm, projection and loss are here."""
        return self.index == self.stages - 1


def pieces_of(spec: ModelSpec, layout: Layout, rank: int, length: int) -> list[Piece]:
    """What pipeline rank `rank` runs: every `pipeline`-th stage."""
    stages = layout.pipeline * layout.stages_per_rank
    spans = cut(spec, length, stages)
    return [Piece(index, stages, *spans[index]) for index in range(rank, stages, layout.pipeline)]


def keep_only(model: Decoder, pieces: Sequence[Piece]) -> None:
    """Drop what other ranks have."""
    kept = {str(layer) for piece in pieces for layer in range(piece.first, piece.last)}
    for name in [name for name in model.layers._modules if name not in kept]:
        del model.layers._modules[name]  # not `del layers[i]`, which would renumber those after it
    first, last = (any(getattr(piece, end) for piece in pieces) for end in ("is_first", "is_last"))
    tied = model.spec.tied and (first or last)
    for name, here in (("embed", first or tied), ("positions", first), ("norm", last), ("head", last or tied)):
        if not here:
            setattr(model, name, None)


def is_cut(model: Decoder) -> bool:
    """Whether other ranks have some of its layers."""
    return len(model.layers) < model.spec.layers


class Stage(nn.Module):
    """One piece of a cut decoder, called once per micro-batch with what the stage before it made."""

    def __init__(self, model: Decoder, piece: Piece) -> None:
        super().__init__()
        self.piece, self.spec = piece, model.spec
        self._model = [model]  # in a list, so that its other pieces are not this module's
        self.layers = nn.ModuleList()
        for layer in range(piece.first, piece.last):
            self.layers._modules[str(layer)] = model.layers._modules[str(layer)]
        both = model.spec.tied and (piece.is_first or piece.is_last)  # so that FSDP2 sees both users of the one weight
        self.embed = model.embed if piece.is_first or both else None
        self.positions = model.positions if piece.is_first else None
        self.norm = model.norm if piece.is_last else None
        self.head = model.head if piece.is_last or both else None
        self.batches: Sequence[Inputs] = ()
        self.counted: Sequence[int] = ()
        self.divisor: float | Tensor | None = None
        self.mean: Tensor | None = None
        """The loss so far, on the last stage."""

    def feed(self, batches: Sequence[Inputs], counted: Sequence[int], divisor: float | Tensor | None) -> None:
        """The micro-batches to come, how many labels of each count, and what the sum of losses is divided by."""
        self.batches, self.counted, self.divisor, self.mean = batches, counted, divisor, None

    def forward(
        self, x: Tensor | None = None, balance: Tensor | None = None, *, number: int
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The residual stream (with the routed layers' summed balance, where there are any), or the loss.

        `number` is the micro-batch's. (On GPUs, FSDP2 cannot hook itself before a call without any argument.)
        """
        model, batch = self._model[0], self.batches[number]
        tokens, labels, documents = batch["tokens"], batch["labels"], batch["documents"]
        assert tokens is not None
        positions = model.token_positions(tokens, documents, None)
        if x is None:
            x = model.embed_tokens(tokens, positions)
        ctx = model.forward_context(x, positions, documents, None)
        for layer in self.layers:
            x, own = layer(x, ctx)
            if own is not None:
                balance = own.view(1).clone() if balance is None else balance + own  # FSDP2 wants no view from a stage
        assert x is not None
        if not self.piece.is_last:
            return x if self.spec.experts is None else (x, x.new_zeros(1).float() if balance is None else balance)
        assert labels is not None
        return self._with_balance(model.loss(model.norm(x), labels, self.divisor), balance, self.counted[number])

    def _with_balance(self, loss: Tensor, balance: Tensor | None, counted: int) -> Tensor:
        """What is differentiated; what is reported leaves the balance out."""
        self.mean = loss.detach() if self.mean is None else self.mean + loss.detach()
        experts = self.spec.experts
        if experts is None or balance is None or self.divisor is None:
            return loss
        routed = sum(self.spec.is_routed(layer) for layer in range(self.spec.layers))
        share = counted / self.divisor
        return loss + experts.balance_weight * balance.squeeze() / routed * share


def carried(spec: ModelSpec, layout: Layout, rows: int, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What goes from stage to stage for one micro-batch, without memory: of tokens that tensor ranks split, a part."""
    split = layout.tensor > 1 and layout.sequence_parallel
    tokens = (1, even_share(rows, length, layout.tensor)) if split else (rows, length)
    stream = torch.empty(*tokens, spec.hidden_size, dtype=dtype, device="meta", requires_grad=True)
    if spec.experts is None:
        return (stream,)
    return stream, torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True)
