"""Whether this machine's processor has native bf16, from /proc/cpuinfo; and this process's peak memory.

Without native instructions a bf16 matrix product on a CPU is about 200 times slower than float32
(256³ took 266 ms against 1.3 on a Neoverse-N1), so the trainer must know before it picks a precision.
"""

import re
import sys
from pathlib import Path

_BF16_FEATURES = {"bf16", "avx512_bf16", "amx_bf16"}


def has_native_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor multiplies bf16 natively; False where the kernel does not say (macOS, Windows)."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    features = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, flags=re.MULTILINE)
    return any(_BF16_FEATURES & set(line.split()) for line in features)


def peak_resident_bytes() -> int:
    """Most memory this process has held so far."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
