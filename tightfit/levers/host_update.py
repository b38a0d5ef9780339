"""Updates made by the host: gradients go out, torch's fused CPU AdamW runs beside backward, narrow weights come back.

A weight then costs 4 + 2 bytes of traffic where its states would cost 24, but 28 bytes of the host's memory bandwidth,
which the link uses too. So it depends on the machine: `faster_route` measures both. Masters and moments must be
float32, which is what torch's kernel takes; rounding differs from the GPU's kernels in the last bits.

One thread does it all, in order; two pieces take turns, so that one's gradient arrives while the other is updated.
Where there is no GPU it is done at once, in the caller's thread.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tightfit.kernels.adamw import Numbers
from tightfit.levers.side_stream import Mark, SideStream
from tightfit.memory.host import claimed, host_empty

SLOTS = 2
Route = Literal["gpu", "host"]
STATES = ("weight", "exp_avg", "exp_avg_sq")
MEASURED_ELEMENTS = 16 * 2**20
REPEATS = 3


@dataclass
class HostWork:
    """One matrix to update: its states on the host, its gradient and its narrow copy on the GPU, all in rows."""

    states: dict[str, Tensor]
    gradient: Tensor
    copy: Tensor | None
    factor: Tensor | None
    numbers: Numbers
    rows_per_piece: int

    def pieces(self) -> Iterator[slice]:
        """Rows that are updated at a time."""
        for begin in range(0, self.gradient.shape[0], self.rows_per_piece):
            yield slice(begin, min(begin + self.rows_per_piece, self.gradient.shape[0]))


@dataclass
class _Slot:
    wide: Tensor
    """The gradient in float32, still on the GPU."""
    gradient: Tensor
    narrow: Tensor
    arrived: Mark = None
    returned: Mark = None


class HostUpdates:
    """Takes matrices to update; what `submit` returns is done when the host's part is."""

    def __init__(self, device: torch.device, piece_elements: int, dtype: torch.dtype) -> None:
        self.outbound, self.inbound = SideStream(device), SideStream(device)
        self.slots = [_slot(device, piece_elements, dtype) for _ in range(SLOTS)]
        self.thread = ThreadPoolExecutor(1, "host updates") if device.type == "cuda" else None

    def submit(self, work: HostWork) -> "Future[Mark]":
        """Begins when the current stream has made the gradient. The result marks the narrow weight's return."""
        self.outbound.wait_for_current()
        if self.thread is not None:
            return self.thread.submit(self._update, work)
        done: Future[Mark] = Future()
        done.set_result(self._update(work))
        return done

    @torch.no_grad()
    def _update(self, work: HostWork) -> Mark:
        pieces = list(work.pieces())
        self._send(work, pieces[0], self.slots[0])
        for index, rows in enumerate(pieces):
            if index + 1 < len(pieces):
                self._send(work, pieces[index + 1], self.slots[(index + 1) % SLOTS])
            self._update_piece(work, rows, self.slots[index % SLOTS])
        return self.inbound.mark()

    def _send(self, work: HostWork, rows: slice, slot: _Slot) -> None:
        """The gradient sets out, multiplied by what clipping wants."""
        part = work.gradient[rows]
        with self.outbound:
            wide = slot.wide[: part.numel()].view(part.shape)
            wide.copy_(part) if work.factor is None else torch.mul(part.float(), work.factor, out=wide)
            slot.gradient[: part.numel()].view(part.shape).copy_(wide, non_blocking=True)
        slot.arrived = self.outbound.mark()

    def _update_piece(self, work: HostWork, rows: slice, slot: _Slot) -> None:
        _wait(slot.arrived)
        weight, m, v = (work.states[kind][rows] for kind in STATES)
        fused_adamw(weight, slot.gradient[: weight.numel()].view(weight.shape), m, v, work.numbers)
        if work.copy is not None:
            _wait(slot.returned)
            narrow = slot.narrow[: weight.numel()].view(weight.shape)
            narrow.copy_(weight)
            with self.inbound:
                work.copy[rows].copy_(narrow, non_blocking=True)
            slot.returned = self.inbound.mark()


def fused_adamw(weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, numbers: Numbers) -> None:
    """Torch's own, on all of the host's threads."""
    step = torch.tensor(float(numbers.step))
    torch._fused_adamw_(
        [weight], [gradient], [m], [v], [], [step], amsgrad=False, lr=numbers.lr, beta1=numbers.beta1,
        beta2=numbers.beta2, weight_decay=numbers.weight_decay, eps=numbers.eps, maximize=False,
    )  # fmt: skip


def faster_route(device: torch.device) -> tuple[Route, dict[Route, float]]:
    """Which way a weight is updated sooner here, and both rates in weights a second, the host's beside a busy link."""
    if device.type != "cuda":
        return "host", {}
    host = [host_empty((MEASURED_ELEMENTS,), torch.float32, device).fill_(0.1) for _ in range(4)]
    there = [torch.empty(MEASURED_ELEMENTS, device=device) for _ in range(2)]
    inbound, outbound = SideStream(device), SideStream(device)

    def travel() -> None:
        with inbound:
            there[0].copy_(host[0], non_blocking=True)
        with outbound:
            host[1].copy_(there[1], non_blocking=True)

    link = _rate(travel) * 4 / 12
    numbers = Numbers(1e-3, 0.9, 0.95, 1e-8, 0.1, 1)

    def update() -> None:
        travel()
        fused_adamw(host[0], host[1], host[2], host[3].abs_(), numbers)

    rates: dict[Route, float] = {"gpu": link, "host": _rate(update)}
    return max(rates, key=lambda route: rates[route]), rates


def _rate(do: Callable[[], None]) -> float:
    do()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(REPEATS):
        do()
    torch.cuda.synchronize()
    return REPEATS * MEASURED_ELEMENTS / (time.perf_counter() - began)


def _slot(device: torch.device, elements: int, dtype: torch.dtype) -> _Slot:
    wide = claimed(torch.empty(elements, device=device), "workspace", "gradients on their way")
    gradient = host_empty((elements,), torch.float32, device, "gradients", "on their way")
    return _Slot(wide, gradient, host_empty((elements,), dtype, device, "weights", "on their way"))


def _wait(mark: Mark) -> None:
    """On the host."""
    if mark is not None:
        mark.synchronize()
