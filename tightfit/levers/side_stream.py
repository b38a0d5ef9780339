"""A side stream: copies between host and GPU that run beside the step's own kernels. On CPUs, nothing but the order."""

from types import TracebackType
from typing import Any

import torch

Mark = torch.cuda.Event | None
"""A point in a stream; None where there are no streams."""


class SideStream:
    """`with side:` queues what is inside on a stream of its own; the two waits order it against the current one."""

    def __init__(self, device: torch.device, *, first: bool = False) -> None:
        """Kernels of one that goes `first` need not wait until a large kernel of the step has left room for them."""
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1 if first else 0) if device.type == "cuda" else None
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

    def wait_for_current(self) -> None:
        """What is queued here next begins after all that the current stream has been given so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def current_waits(self) -> None:
        """What the current stream is given next begins after all that has been queued here."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def mark(self) -> Mark:
        """A point in this stream that others can wait for."""
        return None if self.stream is None else self.stream.record_event()

    def wait_for(self, mark: Mark) -> None:
        """What is queued here next begins after `mark`."""
        if self.stream is not None and mark is not None:
            self.stream.wait_event(mark)


def current_waits_for(mark: Mark) -> None:
    """What the current stream is given next begins after `mark`."""
    if mark is not None:
        torch.cuda.current_stream().wait_event(mark)


def current_mark(device: torch.device) -> Mark:
    """The point that the current stream has been given work up to."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
