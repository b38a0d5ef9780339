"""This machine as a Machine, from nvidia-smi and /proc, without torch."""

import re
import subprocess
from pathlib import Path

from tightfit.errors import UserError
from tightfit.hardware.catalog import CATALOG
from tightfit.hardware.machine import Machine, parse_machine

QUERY = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]


def local_machine(host_memory: str | int | None = None, listing: str | None = None) -> Machine:
    """The GPUs of this machine as a Machine; `listing` replaces the output of nvidia-smi."""
    rows = [row.rsplit(",", 1) for row in (_listing() if listing is None else listing).splitlines() if row.strip()]
    if not rows:
        raise UserError("nvidia-smi lists no GPU here; name the machine instead, such as --on 8xH100-80GB")
    names = {_catalog_name(name.strip(), int(float(mib))) for name, mib in rows}
    if len(names) > 1:
        raise UserError(f"this machine mixes {' and '.join(sorted(names))}; name one kind, such as --on 2x{min(names)}")
    host = _host_bytes() if host_memory is None else host_memory
    return parse_machine(f"{len(rows)}x{names.pop()}", host)


def _listing() -> str:
    try:
        return subprocess.run(QUERY, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        raise UserError(
            "this machine has no GPU that nvidia-smi can list; name the machine instead, such as --on 8xH100-80GB"
        ) from None


def _catalog_name(name: str, total_mib: int) -> str:
    """From `Tesla V100-SXM2-32GB` and its memory to `V100-32GB:sxm`."""
    words = re.sub(r"[^A-Z0-9]", " ", name.upper().replace("RTX ", "RTX")).split()
    rows = [row for row in CATALOG if row.family in words]
    rows = [row for row in rows if abs(total_mib * 2**20 - row.memory_gb * 10**9) < 0.12 * row.memory_gb * 10**9]
    if not rows:
        raise UserError(
            f"this machine's {name} ({total_mib} MiB) is not in the catalog; `tightfit hardware` lists what is"
        )
    forms = [row for row in rows if any(word.startswith(row.form.upper()) for word in words)]
    forms = forms or ([row for row in rows if row.form == "sxm" and "HBM3" in words] or rows)
    return f"{forms[0].name}:{forms[0].form}"


def _host_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    try:
        match = re.search(r"^MemTotal:\s+(\d+) kB", meminfo.read_text(encoding="utf-8"), flags=re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None
