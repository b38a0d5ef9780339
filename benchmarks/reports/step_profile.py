"""Where the time of a training step goes, from benchmarks/step_profile.py's rows: one column per workload."""

import csv
from collections import defaultdict
from pathlib import Path

KINDS = {
    "matrix products of the layers": ("product",),
    "of these alone, each after a rest": (),
    "of these alone, in the step's sequence": (),
    "attention": ("aten::_cudnn_attention", "aten::_scaled_dot", "tightfit::flash"),
    "projection and loss": ("loss:", "tightfit::scaled_copy"),
    "update and gradient norm": ("tightfit::adamw_list", "tightfit::gradient_norm", "aten::_fused_adamw", "aten::_for"),
    "norms, rope, activations, additions": ("tightfit::", "aten::"),
    "nothing runs": ("the GPU idles",),
}
"""Kind → how its groups' names begin; the first that fits."""


def profile_rows(results: Path) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows: milliseconds by kind for the newest profile of our decoder on each workload."""
    with results.open(encoding="utf-8", newline="") as file:
        ours = [row for row in csv.DictReader(file) if row["implementation"] == "tightfit"]
    cases = sorted({row["case"] for row in ours})
    columns = [_column([row for row in ours if row["case"] == case]) for case in cases]
    rows = [(kind, *(f"{column[kind]:.1f}" for column in columns)) for kind in (*KINDS, "a step, not profiled")]
    return ("ms", *(case.removeprefix("h200-").upper() for case in cases)), rows


def _column(rows: list[dict[str, str]]) -> dict[str, float]:
    newest = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    found: dict[str, float] = defaultdict(float)
    for row in newest:
        kind = next((k for k, names in KINDS.items() if row["group"].startswith(names)), "other")
        found[kind] += float(row["ms"])
        found["of these alone, each after a rest"] += float(row["alone_ms"] or 0)
    found["of these alone, in the step's sequence"] = float(newest[0]["products_in_sequence_ms"])
    found["a step, not profiled"] = float(newest[0]["step_ms"])
    return found
