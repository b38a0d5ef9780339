"""Tables of what one layer saves for backward: the original GPT layer, and one of ours."""

from tightfit.memory.formulas import gpt
from tightfit.memory.formulas.layer import layer_kept
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.models.presets import preset

MODEL, LENGTH = "llama-3.1-8b", 8192


def classic_rows() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the original layer's table."""
    return ("part", "kept", "bytes"), [(row.half, row.name, _times(row)) for row in gpt.ROWS]


def _times(row: gpt.Row) -> str:
    return " + ".join(f"{count} {unit}" for count, unit in ((row.bsh, "bsh"), (row.bssa, "bs²a")) if count)


def layer_rows() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of what one layer of MODEL saves for one row of LENGTH tokens, in 16 bits."""
    kept = layer_kept(LocalShape(preset(MODEL), 1, LENGTH, 2), 0)
    rows = [(one.kind, one.name, f"{one.bytes / 2**20:.2f}", one.why) for one in kept]
    total = ("", "all of it", f"{sum(one.bytes for one in kept) / 2**20:.2f}", "")
    return ("kind", "kept", "MiB", "why"), [*rows, total]
