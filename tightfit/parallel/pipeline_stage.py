"""Pipeline stages: a decoder with this rank's layers only, and modules that run one consecutive span of layers each.

A decoder with some of its layers is still a Decoder with the same names (`layers.7.…` is layer 7 on every rank), so
levers, optimizers and checkpoints work on it as on a whole one. The first stage has the embedding, the last one the
final norm, the output projection and the loss. With tied embeddings both hold a copy of the weight, and pipeline.py
sums their gradients. Every stage builds rope tables and masks itself, from tokens and documents, which all ranks have:
sending the tables would take more bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tightfit.jobs.layout import Layout, stages_of_rank
from tightfit.memory.formulas.cut import cut
from tightfit.models.decoder import Decoder
from tightfit.models.spec import ModelSpec
from tightfit.parallel.tensor import tokens_per_rank

Inputs = dict[str, Tensor | None]
"""A decoder's arguments for one micro-batch: tokens, labels and documents."""


@dataclass(frozen=True)
class StageSpan:
    """Stage `index` of `stages`: the layers [first, last) of the model."""

    index: int
    stages: int
    first: int
    last: int

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has final norm, output projection and loss."""
        return self.index == self.stages - 1


def spans_of(spec: ModelSpec, layout: Layout, rank: int, length: int) -> list[StageSpan]:
    """The stages of pipeline rank `rank`."""
    stages = layout.pipeline * layout.stages_per_rank
    bounds = cut(spec, length, stages)
    own = stages_of_rank(rank, layout.pipeline, layout.stages_per_rank, in_v=layout.in_v)
    return [StageSpan(index, stages, *bounds[index]) for index in own]


def drop_other_stages(model: Decoder, spans: Sequence[StageSpan]) -> None:
    """Remove from `model` the modules of other pipeline ranks."""
    kept = {str(layer) for span in spans for layer in range(span.first, span.last)}
    for name in [name for name in model.layers._modules if name not in kept]:
        del model.layers._modules[name]  # not `del layers[i]`, which would renumber the layers after it
    first, last = any(span.is_first for span in spans), any(span.is_last for span in spans)
    tied = model.spec.tied and (first or last)
    for name, keep in (("embed", first or tied), ("positions", first), ("norm", last), ("head", last or tied)):
        if not keep:
            setattr(model, name, None)


class Stage(nn.Module):
    """A span of a decoder's layers, called once per micro-batch with the output of the stage before it."""

    def __init__(self, model: Decoder, span: StageSpan) -> None:
        super().__init__()
        self.span, self.spec = span, model.spec
        self._model = [model]  # in a list, so that the decoder does not become a submodule
        self.layers = nn.ModuleList()
        for layer in range(span.first, span.last):
            self.layers._modules[str(layer)] = model.layers._modules[str(layer)]
        tied = model.spec.tied and (span.is_first or span.is_last)  # FSDP2 must see both users of the tied weight
        self.embed = model.embed if span.is_first or tied else None
        self.positions = model.positions if span.is_first else None
        self.norm = model.norm if span.is_last else None
        self.head = model.head if span.is_last or tied else None
        self.batches: Sequence[Inputs] = ()
        self.counted: Sequence[int] = ()
        self.divisor: float | Tensor | None = None
        self.mean: Tensor | None = None
        """The step's loss so far, on the last stage."""

    def feed(self, batches: Sequence[Inputs], counted: Sequence[int], divisor: float | Tensor | None) -> None:
        """Set the micro-batches of the next step, the counted labels of each, and the divisor of the summed loss."""
        self.batches, self.counted, self.divisor, self.mean = batches, counted, divisor, None

    def forward(
        self, x: Tensor | None = None, auxiliary: Tensor | None = None, *, number: int
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The residual stream (for MoE also the auxiliary losses summed so far), or on the last stage the loss.

        `number` is the micro-batch's. (Given as a keyword: on GPUs FSDP2's pre-hook fails on a call without arguments.)
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
                own = own.view(1).clone()  # FSDP2 takes no views as outputs
                auxiliary = own if auxiliary is None else auxiliary + own
        assert x is not None
        if not self.span.is_last:
            return x if self.spec.experts is None else (x, x.new_zeros(1).float() if auxiliary is None else auxiliary)
        assert labels is not None
        return self._with_auxiliary(model.loss(model.norm(x), labels, self.divisor), auxiliary, self.counted[number])

    def _with_auxiliary(self, loss: Tensor, auxiliary: Tensor | None, counted: int) -> Tensor:
        """The loss to differentiate, with routed layers' auxiliary losses; `mean`, which is reported, is without."""
        self.mean = loss.detach() if self.mean is None else self.mean + loss.detach()
        if auxiliary is None or self.divisor is None:
            return loss
        routed = sum(self.spec.is_routed(layer) for layer in range(self.spec.layers))
        share = counted / self.divisor
        return loss + auxiliary.squeeze() / routed * share


def stage_outputs(spec: ModelSpec, layout: Layout, rows: int, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Meta tensors like those that a stage sends to the next for one micro-batch of whole rows: this rank's part of the
    residual stream, and for MoE the auxiliary losses."""
    shape = _stream_shape(layout, rows, layout.local_length(length), spec.hidden_size)
    stream = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    if spec.experts is None:
        return (stream,)
    return stream, torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True)


def _stream_shape(layout: Layout, rows: int, length: int, hidden_size: int) -> tuple[int, int, int]:
    """Shape of this rank's part of the residual stream: whole, some tokens, or a block on a mesh of tensor ranks."""
    if layout.tensor_mesh != "1d":
        return -(-rows // layout.row_parts), length, hidden_size // layout.tensor_axes[2]
    if layout.tensor > 1 and layout.sequence_parallel:
        return 1, tokens_per_rank(rows, length, layout.tensor), hidden_size
    return rows, length, hidden_size
