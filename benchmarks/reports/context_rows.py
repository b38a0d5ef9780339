"""Tables of docs/scale.md about the longest rows, from what benchmarks/context_rows.py wrote."""

import csv
from collections.abc import Sequence
from pathlib import Path

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
LINES = ("8, heads", "32, heads")
"""Cases whose memory is told line by line."""


def longest_rows(folder: Path) -> Rows:
    """The longest row of each case, beside what was published for as many GPUs."""
    rows = [
        (
            row["machine"],
            row["layout"].partition(" × ")[2].partition(",")[0],
            "fp8" if "fp8" in row["levers"] else "exact",
            f"{int(row['sequence_length']) / 1e6:.2f} M",
            f"{int(row['published_tokens']) / 1e6:.1f} M",
            f"{row['peak_gib']} of {row['card_gib']} GiB",
            f"{row['rehearsed_gib']} GiB" if row["rehearsed_gib"] else "–",
            f"{row['host_gib']} of {row['host_of_gib']} GiB",
            f"{float(row['step_s']) / 3600:.1f} h",
        )
        for row in _newest(folder / "context_rows.csv", ("case",)).values()
    ]
    header = ("GPUs", "split", "checkpoints", "tokens of a row", "ALST", "GPU", "rehearsed", "host of a node", "step")
    return header, rows


def longest_row_lines(folder: Path) -> Rows:
    """Components of the fullest moment, by formula and rehearsed, of the cases of LINES."""
    found = _newest(folder / "context_rows_lines.csv", ("case", "component"))
    components = dict.fromkeys(component for case, component in found if case in LINES)
    rows = []
    for component in components:
        cells = [component]
        for case in LINES:
            row = found.get((case, component), {"formula_gib": "–", "rehearsed_gib": "–"})
            cells += [row["formula_gib"], row["rehearsed_gib"] or "–"]
        rows.append(tuple(cells))
    return ("GiB", *(f"{case}, {how}" for case in LINES for how in ("formula", "rehearsed"))), rows


def segment_rows(folder: Path) -> Rows:
    """Each case and length through both kinds of segments."""
    rows = []
    with (folder / "context_segments.csv").open(encoding="utf-8", newline="") as file:
        newest = {(row["case"], row["sequence_length"], row["segments"]): row for row in csv.DictReader(file)}
    for (case, length, kind), row in newest.items():
        missing = float(row["missing_gib"])
        held = f"{missing:.1f} GiB are missing" if missing else "goes through"
        cells = f"{row['in_use_gib']} GiB", f"{row['reserved_gib']} GiB", f"{row['card_gib']} GiB: {held}"
        rows.append((case, f"{int(length) / 1e6:.2f} M", kind, *cells))
    return ("GPUs, split", "tokens", "segments", "in use", "held where there is room", "a card's"), rows


def _newest(path: Path, keys: Sequence[str]) -> dict[tuple[str, ...], dict[str, str]]:
    """The last row of each kind; of a case's lines, only those of its newest length."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lengths = {row["case"]: row["sequence_length"] for row in rows}
    return {tuple(row[key] for key in keys): row for row in rows if row["sequence_length"] == lengths[row["case"]]}
