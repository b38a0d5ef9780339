"""Number formats of a run: what the model computes in, whether float32 masters stand behind it, and loss scaling.

bf16 has float32's range and needs no scaling. fp16 (V100, T4) loses gradients below 6e-8, so the loss is multiplied by
a large factor that halves when gradients overflow and doubles after a long calm (Micikevicius et al. 2017).
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from tightfit.errors import UserError
from tightfit.hardware.cpu import has_native_bf16
from tightfit.hardware.timing import seconds_each
from tightfit.jobs.job import Precision, PrecisionName
from tightfit.models.number_formats import COMPUTE_DTYPES, keeps_master_weights

__all__ = ["COMPUTE_DTYPES", "LossScale", "choose_device", "choose_precision", "keeps_master_weights"]

CLEARLY = 0.9
"""bf16 must take at most this share of float32's time, as it costs accuracy and casts."""


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device of the job; a GPU when there is one and nothing else was asked for."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but this machine has no usable CUDA GPU; use device=auto or device=cpu")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def choose_precision(wanted: Precision, device: torch.device) -> PrecisionName:
    """The precision of the job; `auto` takes bf16 where it is native (on a CPU: and faster), else fp16 or fp32."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda" and not torch.cuda.is_available():
        return "bf16"  # a dry run of a job that is to run elsewhere
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp16"
    return faster_on_cpu()


@cache
def faster_on_cpu() -> PrecisionName:
    """bf16 where this processor has it and multiplies it clearly faster than fp32; measured once per process."""
    if not has_native_bf16():
        return "fp32"
    return "bf16" if product_seconds(torch.bfloat16) < CLEARLY * product_seconds(torch.float32) else "fp32"


def product_seconds(dtype: torch.dtype, size: int = 384, times: int = 7) -> float:
    """Seconds of the fastest of `times` products of two square matrices."""
    left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
    return min(seconds_each(lambda: torch.mm(left, right), times))


@dataclass
class LossScale:
    """The dynamic factor of fp16 training; stays 1 for every other precision."""

    value: float = 1.0
    calm_steps: int = 0
    dynamic: bool = False
    growth_interval: int = 1000
    smallest: float = 2.0**-14

    @classmethod
    def for_precision(cls, precision: PrecisionName) -> "LossScale":
        """2¹⁶ to begin with for fp16, else a constant 1."""
        return cls(value=2.0**16, dynamic=True) if precision == "fp16" else cls()

    def update(self, *, overflowed: bool) -> None:
        """Halve after an overflow, double after `growth_interval` steps without one."""
        if not self.dynamic:
            return
        self.calm_steps = 0 if overflowed else self.calm_steps + 1
        if overflowed:
            self.value /= 2
        elif self.calm_steps >= self.growth_interval:
            self.value, self.calm_steps = self.value * 2, 0

    @property
    def exhausted(self) -> bool:
        """Whether halving has gone on so long that the gradients themselves must be infinite."""
        return self.dynamic and self.value < self.smallest
