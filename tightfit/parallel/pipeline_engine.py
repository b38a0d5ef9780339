"""torch.distributed.pipelining with receive buffers that are freed after use, and an optional record of the timeline.

Torch runs the schedules and orders sends so that NCCL cannot deadlock. Its own stage allocates two buffers for every
micro-batch of a step and keeps them: with 64 micro-batches more than the activations in flight. `BufferedStage`
allocates a buffer when it is received into and frees it after its backward. It overrides private methods (leading
underscore), checked against torch 2.11, 2.13 and 2.15, which frees buffers itself.

Schedules, for K ranks and M micro-batches: `gpipe` (with M = 1 the naive pipeline), `1f1b` (gpipe where M < K),
`interleaved`, `zero-bubble` (ZB-H1: backward for inputs first, backward for weights where a rank would idle) and `zb-v`
(the same with two stages a rank, placed in a V: the first rank has the first stage and the last). `2bw` is 1F1B without
a flush between steps, which pipeline_2bw.py runs.
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
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _PipelineSchedule

from tightfit.jobs.layout import Layout
from tightfit.memory.ledger import Phase
from tightfit.parallel.pipeline_stage import Stage

Work = Literal["forward", "backward", "input", "weights"]
Infos = dict[int, tuple[Any, ...]]


class TimedWork(NamedTuple):
    """One forward or backward of one micro-batch on this rank, in seconds of the machine's clock."""

    work: Work
    batch: int
    stage: int
    start_s: float
    end_s: float


class BufferedStage(PipelineStage):
    """A `Stage` for torch's schedules."""

    def __init__(
        self, stage: Stage, boundary: tuple[Tensor, ...], device: torch.device, group: dist.ProcessGroup
    ) -> None:
        """`boundary` are meta tensors like those sent between stages."""
        span = stage.span
        inputs = () if span.is_first else boundary  # torch 2.11 checks the first stage's call against `input_args`
        outputs = (torch.empty((), device="meta"),) if span.is_last else boundary
        super().__init__(stage, span.index, span.stages, device, input_args=inputs, output_args=outputs, group=group)
        self.boundary, self.number = boundary, 0
        self.graph_owners: dict[int, list[Any]] = {}
        """Keeps the autograd graph alive, by micro-batch, between backward for inputs and backward for weights."""
        self.on_phase: Callable[[Phase], None] = lambda phase: None
        self.record: list[TimedWork] | None = None
        """The list that every forward and backward is recorded in; None records nothing."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Torch's messages that connect neighbours, but for those to this rank itself, which torch 2.11 has in a V:
        gloo connects no rank to itself."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_forward_infra(1, *args, **kwargs)
        _copy_to_all(self.args_recv_info, num_microbatches)
        return result

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(1, *args, **kwargs)
        self.chunks = num_microbatches
        _copy_to_all(self.grad_recv_info, num_microbatches)
        return result

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            self._allocate(self.args_recv_info[fwd_chunk_id], leaf=self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id], leaf=False)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _allocate(self, infos: tuple[Any, ...], *, leaf: bool) -> None:
        for info, like in zip(infos, self.boundary, strict=True):
            if getattr(info, "buffer", None) is not None:
                buffer = torch.empty(like.shape, dtype=like.dtype, device=self.device)
                info.buffer = buffer.requires_grad_() if leaf else buffer

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
            outputs = (loss,) if self.is_last else self.outputs(bwd_chunk_id)
            self.graph_owners[bwd_chunk_id] = [_graph_owner(output) for output in outputs if output is not None]
        with self._timed("backward" if full_backward else "input", bwd_chunk_id):
            super().backward_one_chunk(
                bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
            )
        for infos in (self.args_recv_info, self.grad_recv_info):
            for info in infos.get(bwd_chunk_id, ()):
                _free_buffer(info)

    def outputs(self, micro_batch: int) -> tuple[Any, ...]:
        """A micro-batch's outputs of forward; torch 2.15 keeps graph edges in place of tensors already sent."""
        kept: Any = vars(self)
        if "fwd_cache" in kept:
            return tuple(kept["fwd_cache"][micro_batch][0])
        return tuple(kept["_forward_chunk_states"][micro_batch].stage_output_for_backward())

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self.on_phase("backward")
        with self._timed("weights", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        self.graph_owners.pop(bwd_chunk_id, None)

    @contextmanager
    def _timed(self, work: Work, batch: int) -> Iterator[None]:
        if self.record is None:
            yield
            return
        start = self._now()
        yield
        self.record.append(TimedWork(work, batch, self.stage_index, start, self._now()))

    def _now(self) -> float:
        """A clock shared by all processes of a machine; synchronises the GPU, so recording slows the step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _graph_owner(output: Any) -> Any:
    """The object that keeps the graph behind an output alive: its node, or the edge that stands for the output.

    Nodes of Python autograd functions do not keep themselves alive, and between backward for inputs and backward for
    weights torch drops the tensors that do.
    """
    if not isinstance(output, Tensor):
        return output
    with torch.enable_grad():
        return output.view_as(output).grad_fn


def _copy_to_all(infos: Infos, micro_batches: int) -> None:
    """Copy the receive info torch set up for the first micro-batch to all of them, without buffers."""
    for info in infos[0]:
        _free_buffer(info)
    for number in range(1, micro_batches):
        infos[number] = tuple(copy.copy(info) for info in infos[0])


def _free_buffer(info: Any) -> None:
    """Free a receive buffer; an empty tensor takes its place, as torch reads the attribute between steps."""
    if getattr(info, "buffer", None) is not None:
        info.buffer = torch.empty(0)


def make_schedule(
    layout: Layout, stages: list[BufferedStage], micro_batches: int, loss: Callable[..., Tensor]
) -> _PipelineSchedule:
    """Torch's schedule for `micro_batches` micro-batches a step; `scale_grads=False` leaves gradients as sums."""
    options: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": loss, "scale_grads": False}
    match layout.schedule:
        case "interleaved":
            return ScheduleInterleaved1F1B([*stages], **options)
        case "zero-bubble":
            return ScheduleInterleavedZeroBubble([*stages], **options)
        case "zb-v":
            return ScheduleZBVZeroBubble([*stages], **options)
        case "1f1b" | "2bw" if micro_batches >= layout.pipeline:
            return Schedule1F1B(stages[0], **options)
    return ScheduleGPipe(stages[0], **options)
