"""What processes run that are there to fail; apart, so that a new process imports nothing else for it."""

import os
import signal
import time

import torch
import torch.distributed as dist

from tightfit.errors import UserError


def refuse_or_wait(device: torch.device, how: str) -> None:
    """The second rank refuses, fails or is killed; the first would wait for it."""
    if dist.get_rank() == 1 and how == "refuse":
        raise UserError("the second rank refuses")
    if dist.get_rank() == 1 and how == "fail":
        1 / 0  # noqa: B018
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
