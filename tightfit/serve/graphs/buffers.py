"""What captured steps read: buffers at fixed addresses on the device, filled from the host without waiting."""

import numpy as np
import torch

from tightfit.serve.schedule.sequence import Sequence


class Staged:
    """A buffer on the device and two pinned copies on the host, used in turn: one may still be being sent."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.device_side = torch.zeros(shape, dtype=dtype, device=device)
        on_gpu = device.type == "cuda"
        self._hosts = [torch.zeros(shape, dtype=dtype, pin_memory=on_gpu) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._hosts] if on_gpu else []
        self._turn = 0

    def host(self) -> "np.ndarray":
        """The host's copy to fill before the next `send`, which no earlier one still reads."""
        if self._sent:
            self._sent[self._turn].synchronize()
        return self._hosts[self._turn].numpy()

    def send(self, rows: int | None = None) -> None:
        """Copy the first `rows` to the device."""
        host = self._hosts[self._turn]
        self.device_side[:rows].copy_(host[:rows], non_blocking=True)
        if self._sent:
            self._sent[self._turn].record()
        self._turn = 1 - self._turn


class SlotTables:
    """The block table of every slot, on the host: an array, from which steps take rows."""

    def __init__(self, slots: int, columns: int) -> None:
        self.rows = np.zeros((slots, columns), dtype=np.int32)
        # Per slot: the list of blocks that its table was filled from, and how many of them.
        self._known: list[tuple[list[int] | None, int]] = [(None, 0)] * slots

    def note(self, sequence: Sequence) -> None:
        """Bring the table of the sequence's slot up to date; the sequence gets a new list of blocks whenever it is
        admitted."""
        slot, blocks = sequence.slot, sequence.blocks
        whose, known = self._known[slot]
        if whose is not blocks or known != len(blocks):
            known = known if whose is blocks else 0
            self.rows[slot, known : len(blocks)] = blocks[known:]
            self._known[slot] = (blocks, len(blocks))
