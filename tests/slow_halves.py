"""Matrix products of 16-bit floats on CPUs that have no instructions for them: imported for its effect.

On aarch64 without bf16, oneDNN takes float16 for a type that it does not have, and computes element by element: a
product of 128 × 256 × 256 in 160 ms. torch's own kernels need 4 ms, and add in float32 as well.
"""

import platform

import torch


def leave_to_torch() -> None:
    """Where it is so, and nowhere else: elsewhere oneDNN has the native instructions."""
    if platform.machine() == "aarch64" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        torch.backends.mkldnn.set_flags(_enabled=False)
