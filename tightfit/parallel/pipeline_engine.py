"""Torch's pipeline engine, with receive buffers that live only as long as they are needed, and a record of who works.

`torch.distributed.pipelining` runs the schedules and orders sends so that NCCL cannot deadlock. As it comes, a stage
allocates a buffer for every micro-batch of a step, twice, and keeps them for good: with 64 micro-batches more than the
activations in flight. `LeanStage` allocates one when it is received and lets go after its backward.
Names that begin with an underscore are torch's own insides; torch 2.11 to 2.13 have been looked at.

Schedules, for K ranks and M micro-batches: `gpipe` (with M = 1 the naive pipeline), `1f1b` (which with M < K is gpipe),
`interleaved`, and `zero-bubble` (ZB-H1: backward for inputs first, for weights where a rank would wait).
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import _PipelineSchedule

from tightfit.jobs.layout import Layout
from tightfit.memory.ledger import Phase
from tightfit.parallel.pipeline_stage import Stage

Work = Literal["forward", "backward", "input", "weights"]
Infos = dict[int, tuple[Any, ...]]


class Slot(NamedTuple):
    """One piece of work of this rank, in seconds of the machine's clock."""

    work: Work
    batch: int
    stage: int
    start_s: float
    end_s: float


class LeanStage(PipelineStage):
    """A stage as torch's schedules drive it."""

    def __init__(
        self, stage: Stage, carried: tuple[Tensor, ...], device: torch.device, group: dist.ProcessGroup
    ) -> None:
        piece = stage.piece
        given = () if piece.is_first else carried  # torch 2.11 looks whether the first is called with what it was told
        made = (torch.empty((), device="meta"),) if piece.is_last else carried
        super().__init__(stage, piece.index, piece.stages, device, input_args=given, output_args=made, group=group)
        self.carried, self.number = carried, 0
        self.owners: dict[int, list[Any]] = {}
        """By micro-batch whose backward for weights is still to come, what keeps its graph."""
        self.on_phase: Callable[[Phase], None] = lambda phase: None
        self.record: list[Slot] | None = None
        """Filled while there is one."""

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_forward_infra(1, *args, **kwargs)
        _for_all(self.args_recv_info, num_microbatches)
        return made

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_backward_infra(1, *args, **kwargs)
        self.chunks = num_microbatches
        _for_all(self.grad_recv_info, num_microbatches)
        return made

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            self._allocate(self.args_recv_info[fwd_chunk_id], leaf=self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id], leaf=False)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _allocate(self, infos: tuple[Any, ...], *, leaf: bool) -> None:
        for info, like in zip(infos, self.carried, strict=True):
            if getattr(info, "buffer", None) is not None:
                made = torch.empty(like.shape, dtype=like.dtype, device=self.device)
                info.buffer = made.requires_grad_() if leaf else made

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.number = fwd_chunk_id
        self.on_phase("forward")
        with self._timed("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward_maybe_with_nosync(*args, **kwargs, number=self.number)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.on_phase("backward")
        if not (full_backward or self.is_first):
            made = (loss,) if self.is_last else self.fwd_cache[bwd_chunk_id][0]
            self.owners[bwd_chunk_id] = [_owner(tensor) for tensor in made if tensor is not None]
        with self._timed("backward" if full_backward else "input", bwd_chunk_id):
            super().backward_one_chunk(
                bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
            )
        for infos in (self.args_recv_info, self.grad_recv_info):
            for info in infos.get(bwd_chunk_id, ()):
                _let_go(info)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self.on_phase("backward")
        with self._timed("weights", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        self.owners.pop(bwd_chunk_id, None)

    @contextmanager
    def _timed(self, work: Work, batch: int) -> Iterator[None]:
        if self.record is None:
            yield
            return
        start = self._now()
        yield
        self.record.append(Slot(work, batch, self.stage_index, start, self._now()))

    def _now(self) -> float:
        """The same clock in all processes of a machine; a GPU is waited for, which a record costs."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _owner(tensor: Tensor) -> Any:
    """A node that keeps all nodes behind `tensor`: those of functions written in Python are not kept by themselves, and
    torch 2.11 lets go of what keeps them between backward for inputs and backward for weights."""
    with torch.enable_grad():
        return tensor.view_as(tensor).grad_fn


def _for_all(infos: Infos, micro_batches: int) -> None:
    """What torch set up for the first micro-batch, for all of them, without memory."""
    for info in infos[0]:
        _let_go(info)
    for number in range(1, micro_batches):
        infos[number] = tuple(copy.copy(info) for info in infos[0])


def _let_go(info: Any) -> None:
    """Free a buffer; an empty one stays in its place, as torch looks at it between steps."""
    if getattr(info, "buffer", None) is not None:
        info.buffer = torch.empty(0)


def make_schedule(
    layout: Layout, stages: list[LeanStage], micro_batches: int, loss: Callable[..., Tensor]
) -> _PipelineSchedule:
    """The engine for `micro_batches` micro-batches a step; gradients are not divided by anything."""
    options: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": loss, "scale_grads": False}
    match layout.schedule:
        case "interleaved":
            return ScheduleInterleaved1F1B([*stages], **options)
        case "zero-bubble":
            return ScheduleInterleavedZeroBubble([*stages], **options)
        case "1f1b" if micro_batches >= layout.pipeline:
            return Schedule1F1B(stages[0], **options)
    return ScheduleGPipe(stages[0], **options)
