"""Pipeline parallelism: ranks hold consecutive layers, and micro-batches go through them one after another.

A step's micro-batches are those that one process would accumulate. Every rank of a pipeline has all of their tokens,
labels and documents (pipeline ranks take the same rows); hidden states go forward from stage to stage and their
gradients back. The loss is summed over tokens and divided by the step's, so what a pipeline computes is what one
process does, whatever the schedule.

With data ranks beside it, gradients are summed over them once a step, after the last micro-batch: by us for `zero: 0`,
by FSDP2 for `zero: 1`, which gathers weights at the first forward and keeps them to the end of the step. ZeRO-2 and 3
would reduce gradients, and ZeRO-3 gather weights, at every micro-batch of every stage; they are refused
(jobs/rules). The first and the last stage of a model with tied embeddings hold a copy of the weight each and
exchange its gradients before the update.
Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2021 (1F1B, interleaved), Qi et al. 2023 (zero-bubble).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh

from tightfit.jobs.job import PrecisionName
from tightfit.jobs.layout import Layout
from tightfit.memory.ledger import Phase
from tightfit.models.decoder import Attention, Decoder, DecoderOutput
from tightfit.models.number_formats import COMPUTE_DTYPES
from tightfit.parallel.data import shard
from tightfit.parallel.mesh import sharding_axes
from tightfit.parallel.pipeline_engine import LeanStage, Slot, make_schedule
from tightfit.parallel.pipeline_stage import Inputs, Piece, Stage, carried, keep_only, pieces_of
from tightfit.parallel.shards import local
from tightfit.parallel.tensor import sum_partial_gradients

BUCKET_BYTES = 64 * 2**20
PIECES = "pieces"
OnPhase = Callable[[Phase], None]


def take_stages(model: Decoder, mesh: DeviceMesh, layout: Layout, length: int) -> None:
    """Leave of `model` what this rank's stages have, cut for rows of `length` tokens. Before it has memory."""
    pieces = pieces_of(model.spec, layout, mesh.get_local_rank("pipeline"), length)
    keep_only(model, pieces)
    vars(model)[PIECES] = pieces


def pipelined(model: Decoder, mesh: DeviceMesh, layout: Layout, precision: PrecisionName) -> "Pipeline":
    """The engine around a decoder that `take_stages` has cut, sharded over data ranks for `zero: 1`."""
    if layout.schedule == "zero-bubble":
        _keep_projections_apart(model)
    made = Pipeline(model, vars(model)[PIECES], mesh, layout, COMPUTE_DTYPES[precision])
    if layout.zero:
        stages: list[Any] = made.stages  # which have what `shard` looks at in a decoder
        for stage in stages:
            shard(stage, sharding_axes(mesh), layout.zero, precision)
    return made


def _keep_projections_apart(model: Decoder) -> None:
    """Let every function with weights have one output: where backward goes twice, for inputs and then for weights,
    torch 2.11 adds up the gradients of all outputs of a function and starts the second time from the first of them."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.joint = False


class Pipeline(nn.Module):
    """This rank's stages of a cut decoder, and the engine that runs them."""

    def __init__(
        self, model: Decoder, pieces: Sequence[Piece], mesh: DeviceMesh, layout: Layout, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.decoder, self.layout, self.mesh, self.dtype = model, layout, mesh, dtype
        self.stages = [Stage(model, piece) for piece in pieces]
        self.modules_of_stages = nn.ModuleList(self.stages)
        self.group, self.rank = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
        self.scale = 1.0
        self._engines: dict[tuple[int, int, int], tuple[Any, list[LeanStage]]] = {}
        self.recorded: list[Slot] | None = None
        """What this rank did when in the last step, where somebody put a list here."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.decoder.parameters()).device

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is here."""
        return self.stages[-1].piece.is_last

    @property
    def holds_a_copy(self) -> bool:
        """Whether this is the second copy of a tied embedding."""
        return self.decoder.spec.tied and self.has_loss and not self.stages[0].piece.is_first

    def run(
        self,
        batches: Sequence[Inputs],
        counted: Sequence[int],
        divisor: float | Tensor,
        scale: float,
        on_phase: OnPhase,
    ) -> Tensor:
        """Forward and backward of a step; this rank's part of its mean loss, which is all of it on the last stage."""
        schedule, stages = self._engine(batches)
        self.scale = scale
        for stage, engine in zip(self.stages, stages, strict=True):
            stage.feed(batches, counted, divisor)
            engine.on_phase, engine.record = on_phase, self.recorded
        try:
            schedule.step(target=torch.zeros(len(batches)), return_outputs=False)
        except RuntimeError as error:  # the engine wraps what a stage raises
            raise error.__cause__ or error from None
        sum_partial_gradients(self.decoder)
        self._sum_over_data_ranks()
        self._exchange_tied()
        mean = self.stages[-1].mean
        return torch.zeros((), device=self.device) if mean is None else mean.float()

    def _engine(self, batches: Sequence[Inputs]) -> tuple[Any, list[LeanStage]]:
        rows, length = _shape(batches[0])
        key = (len(batches), rows, length)
        if key not in self._engines:
            self._engines.clear()
            streams = carried(self.decoder.spec, self.layout, rows, length, self.dtype)
            stages = [LeanStage(stage, streams, self.device, self.group) for stage in self.stages]
            self._engines[key] = make_schedule(self.layout, stages, len(batches), self._scaled), stages
        return self._engines[key]

    def _scaled(self, loss: Tensor, target: Tensor) -> Tensor:
        return loss * self.scale

    def _sum_over_data_ranks(self) -> None:
        """Once a step; FSDP2 has done it where it shards."""
        if self.layout.zero or self.mesh["data"].size() == 1:
            return
        group = self.mesh["data"].get_group()
        for bucket in _buckets([p.grad for p in self.decoder.parameters() if p.grad is not None]):
            flat = _flatten_dense_tensors(bucket)
            dist.all_reduce(flat, group=group)
            for gradient, summed in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                gradient.copy_(summed)

    def _exchange_tied(self) -> None:
        """Both copies of a tied embedding get the sum of their gradients, bit for bit the same."""
        first, last = self.stages[0].piece.is_first, self.has_loss
        if not self.decoder.spec.tied or first == last:
            return
        other = self.layout.pipeline - 1 if first else 0
        gradient = self.decoder.embed.weight.grad
        assert gradient is not None
        own = local(gradient)
        received = torch.empty_like(own)
        operations = [
            dist.P2POp(dist.isend, own.contiguous(), group=self.group, group_peer=other),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        own.add_(received)

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, labels: Tensor, *, documents: Tensor | None = None, divisor: float | Tensor | None = None
    ) -> DecoderOutput:
        """The loss of one batch, on all ranks, without backward."""
        batch = {"tokens": tokens, "labels": labels, "documents": documents}
        loss = torch.zeros((), device=self.device)
        for stage in self.stages:
            stage.feed([batch], [0], divisor)
            made = stage(*self._received(stage.piece, tokens), number=0)
            if stage.piece.is_last:
                loss += made.float()
            else:
                for tensor in made if isinstance(made, tuple) else (made,):
                    dist.send(tensor.contiguous(), group=self.group, group_dst=(self.rank + 1) % self.layout.pipeline)
        dist.all_reduce(loss, group=self.group)
        return DecoderOutput(None, loss, None)

    def _received(self, piece: Piece, tokens: Tensor) -> list[Tensor]:
        if piece.is_first:
            return []
        found = []
        for like in carried(self.decoder.spec, self.layout, *_shape({"tokens": tokens}), self.dtype):
            found.append(torch.empty(like.shape, dtype=like.dtype, device=self.device))
            dist.recv(found[-1], group=self.group, group_src=(self.rank - 1) % self.layout.pipeline)
        return found


def _shape(batch: Inputs) -> tuple[int, int]:
    tokens = batch["tokens"]
    assert tokens is not None
    return tokens.shape[0], tokens.shape[1]


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of about BUCKET_BYTES and of one dtype."""
    run: list[Tensor] = []
    held = 0
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        if run and (held + size > BUCKET_BYTES or gradient.dtype != run[0].dtype):
            yield run
            run, held = [], 0
        run.append(gradient)
        held += size
    if run:
        yield run
