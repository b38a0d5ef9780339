"""Overheads: device memory besides tensors. Constants, not fitted; pass your own `Overheads` where you measured them.

- The CUDA context: driver and kernels of torch and its libraries on the card, 500 MiB on an H200 with CUDA 13 (what
  `nvidia-smi` shows for a process beyond what torch has reserved); 300 to 600 MiB on others.
- cuBLAS takes a workspace per thread that calls it (forward's and autograd's), 32 MiB on Hopper, 8.1 MiB before.
- Memory reserved by the allocator but not allocated is fragmentation, which depends on the order of requests. The
  simulation replays it; here it is a flat share, a margin for planning.

NCCL's own buffers are not counted. `fsdp2` decides how long FSDP2's buffers live (fsdp2.py): by default as in torch
2.11, with which the truth tables were measured; plans use the installed torch's.
"""

from dataclasses import dataclass

from tightfit.errors import UserError
from tightfit.memory.formulas.fsdp2 import OLDEST, Fsdp2, installed
from tightfit.memory.ledger import Line, Phase

MIB = 2**20


@dataclass(frozen=True)
class Overheads:
    """Bytes of the CUDA context and of cuBLAS, and the allocator's slack as a share of allocated bytes."""

    context_bytes: int = 500 * MIB
    workspace_bytes: int = 2 * 32 * MIB
    slack_share: float = 0.05
    fsdp2: Fsdp2 = OLDEST

    def __post_init__(self) -> None:
        for name in ("context_bytes", "workspace_bytes", "slack_share"):
            if (value := getattr(self, name)) < 0:
                raise UserError(f"{name} is {value}; give 0 or more")

    def with_these(self, allocated_bytes: int) -> int:
        """`allocated_bytes` with slack and context."""
        return allocated_bytes + int(allocated_bytes * self.slack_share) + self.context_bytes

    def lines(self, phase: Phase, allocated_bytes: int, rank: int = 0) -> list[Line]:
        """The ledger's lines for slack and context."""
        slack_bytes = int(allocated_bytes * self.slack_share)
        why = "a flat share of what is allocated: see overheads.py"
        slack = Line(component="allocator slack", phase=phase, bytes=slack_bytes, why=why, rank=rank)
        why = "driver and kernels: see overheads.py"
        context = Line(component="cuda context", phase=phase, bytes=self.context_bytes, why=why, rank=rank)
        return [line for line in (slack, context) if line.bytes]


DEFAULT = Overheads()
INSTALLED = Overheads(fsdp2=installed())
"""The default of plans."""
ON_CPU = Overheads(context_bytes=0, workspace_bytes=0, fsdp2=installed())
