"""StepTime: where the seconds of one optimizer step go; the parts add up to the step."""

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank. Traffic counts only as far as compute does not hide it."""

    compute_s: float
    """Forward and backward of all micro-batches."""
    recompute_s: float
    """Forward repeated in backward, by checkpointing."""
    tensor_s: float
    """Collectives of tensor ranks."""
    context_s: float
    """Exchange of heads and ring of context ranks."""
    expert_s: float
    """All-to-alls of tokens to experts and back."""
    data_s: float
    """All-gather of weights and reduction of gradients of data ranks."""
    pipeline_s: float
    """Sends of activations and their gradients between stages."""
    bubble_s: float
    """Waiting for other stages."""
    offload_s: float
    """Copies from and to the host, and the optimizer running there."""
    optimizer_s: float
    """The update on the GPU, and summing gradients over micro-batches."""
    launch_s: float = 0.0
    """The card waiting for the host to launch kernels."""
    straggler_s: float = 0.0
    """Waiting for the slowest of many cards."""
    teacher_s: float = 0.0
    """The teacher's forward pass (distillation)."""

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        compute_s = self.compute_s + self.recompute_s
        traffic_s = self.tensor_s + self.context_s + self.expert_s + self.data_s + self.pipeline_s
        waits_s = self.launch_s + self.straggler_s
        return compute_s + traffic_s + self.bubble_s + self.offload_s + self.optimizer_s + waits_s + self.teacher_s

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def parts(self) -> list[tuple[str, float]]:
        """Name and seconds of each part that takes any time, the longest first."""
        found = [(field.name.removesuffix("_s"), float(getattr(self, field.name))) for field in fields(self)]
        return sorted((part for part in found if part[1] > 0), key=lambda part: -part[1])
