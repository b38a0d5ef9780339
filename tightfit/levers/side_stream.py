"""A CUDA side stream: copies between host and GPU that overlap the step's kernels. On CPUs everything runs in order."""

from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from tightfit.kernels.mapped_copy import fetched

StreamEvent = torch.cuda.Event | None
"""A recorded CUDA event; None on CPUs."""


class SideStream:
    """`with side:` queues work on a stream of its own; the waits order it against the current stream."""

    def __init__(self, device: torch.device, *, high_priority: bool = False) -> None:
        """`high_priority` kernels are scheduled before pending thread blocks of the step's kernels."""
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1 if high_priority else 0) if device.type == "cuda" else None
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            self._entered.append(torch.cuda.stream(self.stream))
            self._entered[-1].__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stream is not None:
            self._entered.pop().__exit__(kind, error, trace)

    def wait_for_current_stream(self) -> None:
        """Later work of this stream starts after all work queued on the current stream so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def record_event(self) -> StreamEvent:
        """An event at the end of the work queued on this stream so far."""
        return None if self.stream is None else self.stream.record_event()

    def wait_for(self, event: StreamEvent) -> None:
        """Later work of this stream starts after `event`."""
        if self.stream is not None and event is not None:
            self.stream.wait_event(event)


def current_stream_waits_for(event: StreamEvent) -> None:
    """Later work of the current stream starts after `event`."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def record_current_stream(device: torch.device) -> StreamEvent:
    """An event at the end of the work queued on the current stream so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class HostCopy:
    """Values being copied to the host: `read` waits for the copy, not for work launched after it."""

    def __init__(self, values: Tensor, *, beside_link: bool = False) -> None:
        """`beside_link`: copies of states may be queued on the copy engine, so a kernel copies the values instead
        (kernels/mapped_copy.py)."""
        self._values, self._copied = values, None
        if values.is_cuda:
            self._values = fetched(values) if beside_link else _fetched_by_engine(values)
            self._copied = record_current_stream(values.device)

    def read(self) -> Any:
        """The values as a list; blocks until they have arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()


def _fetched_by_engine(values: Tensor) -> Tensor:
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)
