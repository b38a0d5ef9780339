"""AdamW updates on the host's cores: gradients go to the host, 16-bit weights come back, while backward runs.

The update is torch's fused CPU AdamW. A weight then costs 4 + 2 bytes of link traffic where its states would cost 24,
but 28 bytes of host memory bandwidth, which the link uses too. Which is faster depends on the machine: `faster_route`
measures both. Masters and moments must be float32, as torch's CPU kernel takes nothing else; rounding differs from the
GPU kernels in the last bits.

One thread does all updates in order, with two staging buffers: one receives a gradient while the other is used for an
update. Without a GPU the update runs at once, in the caller's thread.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tightfit.kernels.optimizer.adamw import Numbers
from tightfit.levers.side_stream import SideStream, StreamEvent
from tightfit.memory.host import claimed, host_empty

BUFFERS = 2
Route = Literal["gpu", "host"]
STATES = ("weight", "exp_avg", "exp_avg_sq")
MEASURED_ELEMENTS = 16 * 2**20
REPEATS = 3


@dataclass
class HostWork:
    """One matrix to update, as rows: states on the host, gradient and 16-bit copy on the GPU."""

    states: dict[str, Tensor]
    gradient: Tensor
    copy: Tensor | None
    factor: Tensor | None
    numbers: Numbers
    rows_per_piece: int

    def pieces(self) -> Iterator[slice]:
        """Row ranges that are updated one after another."""
        for begin in range(0, self.gradient.shape[0], self.rows_per_piece):
            yield slice(begin, min(begin + self.rows_per_piece, self.gradient.shape[0]))


@dataclass
class _StagingBuffers:
    gradient_on_gpu: Tensor
    """The gradient cast to float32, before its copy to the host."""
    gradient: Tensor
    weight: Tensor
    """The updated weight in the model's dtype, before its copy to the GPU."""
    gradient_arrived: StreamEvent = None
    weight_returned: StreamEvent = None


class HostUpdates:
    """A queue of matrices that the host updates."""

    def __init__(self, device: torch.device, piece_elements: int, dtype: torch.dtype) -> None:
        self.outbound, self.inbound = SideStream(device), SideStream(device)
        self.buffers = [_staging_buffers(device, piece_elements, dtype) for _ in range(BUFFERS)]
        self.thread = ThreadPoolExecutor(1, "host updates") if device.type == "cuda" else None

    def submit(self, work: HostWork) -> "Future[StreamEvent]":
        """Queue an update, which starts when the current stream has computed the gradient. The future's result is the
        event after which the new weight is on the GPU."""
        self.outbound.wait_for_current_stream()
        if self.thread is not None:
            return self.thread.submit(self._update, work)
        done: Future[StreamEvent] = Future()
        done.set_result(self._update(work))
        return done

    @torch.no_grad()
    def _update(self, work: HostWork) -> StreamEvent:
        pieces = list(work.pieces())
        self._send_gradient(work, pieces[0], self.buffers[0])
        for index, rows in enumerate(pieces):
            if index + 1 < len(pieces):
                self._send_gradient(work, pieces[index + 1], self.buffers[(index + 1) % BUFFERS])
            self._update_piece(work, rows, self.buffers[index % BUFFERS])
        return self.inbound.record_event()

    def _send_gradient(self, work: HostWork, rows: slice, buffers: _StagingBuffers) -> None:
        """Copy a piece's gradient, times the clipping factor, to the host."""
        part = work.gradient[rows]
        with self.outbound:
            wide = buffers.gradient_on_gpu[: part.numel()].view(part.shape)
            wide.copy_(part) if work.factor is None else torch.mul(part.float(), work.factor, out=wide)
            buffers.gradient[: part.numel()].view(part.shape).copy_(wide, non_blocking=True)
        buffers.gradient_arrived = self.outbound.record_event()

    def _update_piece(self, work: HostWork, rows: slice, buffers: _StagingBuffers) -> None:
        _block_until(buffers.gradient_arrived)
        weight, m, v = (work.states[kind][rows] for kind in STATES)
        fused_adamw(weight, buffers.gradient[: weight.numel()].view(weight.shape), m, v, work.numbers)
        if work.copy is not None:
            _block_until(buffers.weight_returned)
            narrow = buffers.weight[: weight.numel()].view(weight.shape)
            narrow.copy_(weight)
            with self.inbound:
                work.copy[rows].copy_(narrow, non_blocking=True)
            buffers.weight_returned = self.inbound.record_event()


def fused_adamw(weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, numbers: Numbers) -> None:
    """Torch's fused CPU AdamW, on all threads."""
    torch._fused_adamw_(
        [weight],
        [gradient],
        [m],
        [v],
        [],
        [torch.tensor(float(numbers.step))],
        amsgrad=False,
        lr=numbers.lr,
        beta1=numbers.beta1,
        beta2=numbers.beta2,
        weight_decay=numbers.weight_decay,
        eps=numbers.eps,
        maximize=False,
    )


def faster_route(device: torch.device) -> tuple[Route, dict[Route, float]]:
    """Which of GPU and host updates offloaded states faster on this machine, and both rates in weights a second.

    The host's rate is measured while the link is busy, as both share the host's memory bandwidth.
    """
    if device.type != "cuda":
        return "host", {}
    host = [host_empty((MEASURED_ELEMENTS,), torch.float32, device).fill_(0.1) for _ in range(4)]
    gpu = [torch.empty(MEASURED_ELEMENTS, device=device) for _ in range(2)]
    inbound, outbound = SideStream(device), SideStream(device)

    def copy_both_ways() -> None:
        with inbound:
            gpu[0].copy_(host[0], non_blocking=True)
        with outbound:
            host[1].copy_(gpu[1], non_blocking=True)

    def update() -> None:
        copy_both_ways()
        numbers = Numbers(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
        fused_adamw(host[0], host[1], host[2], host[3].abs_(), numbers)

    link = _rate(copy_both_ways) * 4 / 12  # three float32 states a weight, one of which was copied
    rates: dict[Route, float] = {"gpu": link, "host": _rate(update)}
    return max(rates, key=lambda route: rates[route]), rates


def _rate(do: Callable[[], None]) -> float:
    """Elements a second."""
    do()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(REPEATS):
        do()
    torch.cuda.synchronize()
    return REPEATS * MEASURED_ELEMENTS / (time.perf_counter() - began)


def _staging_buffers(device: torch.device, elements: int, dtype: torch.dtype) -> _StagingBuffers:
    return _StagingBuffers(
        gradient_on_gpu=claimed(torch.empty(elements, device=device), "workspace", "gradients on their way"),
        gradient=host_empty((elements,), torch.float32, device, "gradients", "on their way"),
        weight=host_empty((elements,), dtype, device, "weights", "on their way"),
    )


def _block_until(event: StreamEvent) -> None:
    if event is not None:
        event.synchronize()
