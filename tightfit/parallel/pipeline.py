"""Pipeline parallelism: ranks hold consecutive layers, and micro-batches go through them one after another.

A step's micro-batches are those that one process would accumulate. Every pipeline rank has the tokens, labels and
documents of all micro-batches; hidden states are sent forward from stage to stage and their gradients backward. The
loss is summed over tokens and divided by the step's token count, so every schedule computes what one process would.

With data parallelism, gradients are summed over data ranks once a step, after the last micro-batch: here for `zero: 0`,
by FSDP2 for `zero: 1`, which all-gathers weights at the first forward and keeps them to the end of the step. ZeRO-2 and
3 would reduce gradients, and ZeRO-3 all-gather weights, at every micro-batch of every stage; they are refused
(jobs/rules). With tied embeddings the first and the last stage hold a copy of the weight each and exchange its
gradients before the update; the gradient norm counts one of them (`counted_elsewhere`).
Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2021 (1F1B, interleaved), Qi et al. 2023 (zero-bubble).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh

from tightfit.collectives.shards import local
from tightfit.jobs.job import PrecisionName
from tightfit.jobs.layout import Layout
from tightfit.memory.ledger import Phase
from tightfit.models.decoder import Attention, Decoder, DecoderOutput
from tightfit.models.number_formats import COMPUTE_DTYPES
from tightfit.parallel.data import shard
from tightfit.parallel.expert import expert_parameters, share_expert_axes, sum_expert_gradients
from tightfit.parallel.mesh import sharding_axes
from tightfit.parallel.pipeline_engine import BufferedStage, TimedWork, make_schedule
from tightfit.parallel.pipeline_stage import Inputs, Stage, StageSpan, drop_other_stages, spans_of, stage_outputs
from tightfit.parallel.shard_groups import shard_groups
from tightfit.parallel.tensor import sum_partial_gradients

BUCKET_BYTES = 64 * 2**20
SPANS = "stage_spans"
"""Name of the decoder attribute that holds the spans of this rank's stages."""
TIED_WEIGHT = "embed.weight"
OnPhase = Callable[[Phase], None]


def take_stages(model: Decoder, mesh: DeviceMesh, layout: Layout, length: int) -> None:
    """Drop other ranks' layers from `model`, on the meta device; stages are balanced for rows of `length` tokens."""
    spans = spans_of(model.spec, layout, mesh.get_local_rank("pipeline"), length)
    drop_other_stages(model, spans)
    vars(model)[SPANS] = spans


def counted_elsewhere(model: Decoder) -> frozenset[str]:
    """Parameters of this rank that are copies of another pipeline rank's: the last stage's tied embedding."""
    spans: Sequence[StageSpan] = vars(model).get(SPANS, ())
    is_copy = model.spec.tied and bool(spans) and spans[-1].is_last and not spans[0].is_first
    return frozenset({TIED_WEIGHT}) if is_copy else frozenset()


def pipelined(model: Decoder, mesh: DeviceMesh, layout: Layout, precision: PrecisionName) -> "Pipeline":
    """The pipeline of a decoder that `take_stages` has cut, sharded over data ranks for `zero: 1`."""
    if layout.splits_backward:
        _unfuse_qkv(model)
    pipeline = Pipeline(model, vars(model)[SPANS], mesh, layout, COMPUTE_DTYPES[precision])
    if layout.zero:
        stages: list[Any] = pipeline.stages  # `shard` takes a decoder; a stage has the attributes it reads
        for stage in stages:
            share_expert_axes(model, stage)
            shard(stage, sharding_axes(mesh), layout.zero, precision)
            for group in () if layout.splits_backward else shard_groups(stage):
                group.widen_when_done()
    return pipeline


def _unfuse_qkv(model: Decoder) -> None:
    """Give every autograd function with weights a single output.

    The zero-bubble schedule runs backward twice, for inputs and then for weights. For a function with several outputs
    torch 2.11 sums all their gradients and starts the second pass from the first of them.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            module.impl = replace(module.impl, fused_qkv=False)


class Pipeline(nn.Module):
    """This rank's stages of a decoder, and the schedule that runs them."""

    def __init__(
        self, model: Decoder, spans: Sequence[StageSpan], mesh: DeviceMesh, layout: Layout, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.decoder, self.layout, self.mesh, self.dtype = model, layout, mesh, dtype
        self.stages = [Stage(model, span) for span in spans]
        self.modules_of_stages = nn.ModuleList(self.stages)
        self.group, self.rank = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
        self.scale = 1.0
        self._engines: dict[tuple[int, int, int], tuple[Any, list[BufferedStage]]] = {}
        self.recorded: list[TimedWork] | None = None
        """Set to a list to record when this rank runs each forward and backward."""

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.decoder.parameters()).device

    @property
    def has_loss(self) -> bool:
        """Whether this rank has the last stage."""
        return self.stages[-1].span.is_last

    def run(
        self,
        batches: Sequence[Inputs],
        counted: Sequence[int],
        divisor: float | Tensor,
        scale: float,
        on_phase: OnPhase,
    ) -> Tensor:
        """Forward and backward of a step; returns its mean loss on the rank of the last stage, 0 on the others."""
        schedule, stages = self._engine(batches)
        self.scale = scale
        for stage, engine in zip(self.stages, stages, strict=True):
            stage.feed(batches, counted, divisor)
            engine.on_phase, engine.record = on_phase, self.recorded
        try:
            schedule.step(target=torch.zeros(len(batches)), return_outputs=False)
        except RuntimeError as error:  # torch's schedule wraps what a stage raises
            raise error.__cause__ or error from None
        sum_partial_gradients(self.decoder)
        sum_expert_gradients(self.decoder)
        self._sum_over_data_ranks()
        self._exchange_tied()
        mean = self.stages[-1].mean
        return torch.zeros((), device=self.device) if mean is None else mean.float()

    def _engine(self, batches: Sequence[Inputs]) -> tuple[Any, list[BufferedStage]]:
        rows, length = _shape(batches[0])
        key = (len(batches), rows, length)
        if key not in self._engines:
            self._engines.clear()
            outputs = stage_outputs(self.decoder.spec, self.layout, rows, length, self.dtype)
            stages = [BufferedStage(stage, outputs, self.device, self.group) for stage in self.stages]
            self._engines[key] = make_schedule(self.layout, stages, len(batches), self._scaled), stages
        return self._engines[key]

    def _scaled(self, loss: Tensor, target: Tensor) -> Tensor:
        return loss * self.scale

    def _sum_over_data_ranks(self) -> None:
        """All-reduce gradients over data and context ranks, unless FSDP2 has reduced them."""
        if self.layout.zero or self.layout.gradient_ranks == 1:
            return
        group = sharding_axes(self.mesh).get_group()
        elsewhere = set(expert_parameters(self.decoder))
        named = self.decoder.named_parameters()
        for bucket in _buckets([p.grad for name, p in named if p.grad is not None and name not in elsewhere]):
            flat = _flatten_dense_tensors(bucket)
            dist.all_reduce(flat, group=group)
            for gradient, summed in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                gradient.copy_(summed)

    def _exchange_tied(self) -> None:
        """Give both copies of a tied embedding the sum of their gradients, bit for bit the same."""
        first, last = self.stages[0].span.is_first, self.has_loss
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
        """The loss of one batch, on all ranks, without gradients."""
        batch = {"tokens": tokens, "labels": labels, "documents": documents}
        loss = torch.zeros((), device=self.device)
        sent: tuple[Tensor, ...] = ()
        for stage in self.stages:
            stage.feed([batch], [0], divisor)
            out = stage(*self._receive(stage.span, tokens, sent), number=0)
            if stage.span.is_last:
                loss += out.float()
            else:
                sent = self._send(stage.span, out if isinstance(out, tuple) else (out,))
        dist.all_reduce(loss, group=self.group)
        return DecoderOutput(None, loss, None)

    def _send(self, span: StageSpan, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Send `out` to the next stage, unless this rank has that stage too (at the bottom of a V); returns `out`."""
        next_rank = self.layout.rank_of_stage(span.index + 1)
        if next_rank != self.rank:
            for tensor in out:
                dist.send(tensor.contiguous(), group=self.group, group_dst=next_rank)
        return out

    def _receive(self, span: StageSpan, tokens: Tensor, sent: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """The output of the stage before: received, or `sent` where this rank has that stage too."""
        if span.is_first:
            return []
        rank_before = self.layout.rank_of_stage(span.index - 1)
        if rank_before == self.rank:
            return sent
        found = []
        for like in stage_outputs(self.decoder.spec, self.layout, *_shape({"tokens": tokens}), self.dtype):
            found.append(torch.empty(like.shape, dtype=like.dtype, device=self.device))
            dist.recv(found[-1], group=self.group, group_src=rank_before)
        return found


def _shape(batch: Inputs) -> tuple[int, int]:
    tokens = batch["tokens"]
    assert tokens is not None
    return tokens.shape[0], tokens.shape[1]


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Buckets of about BUCKET_BYTES, each of one dtype."""
    bucket: list[Tensor] = []
    bucket_bytes = 0
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        if bucket and (bucket_bytes + size > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, bucket_bytes = [], 0
        bucket.append(gradient)
        bucket_bytes += size
    if bucket:
        yield bucket
