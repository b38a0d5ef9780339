"""The table of products with packed weights in docs/kernels.md: ours beside other packages', of the newest run."""

from pathlib import Path

from benchmarks.reports.compression import Row, Table, read_rows

TORCHS = ("bf16", "torch int4 g128")
"""Names of what torch itself brings; others' end with their package and version in brackets."""


def newest_run(results: Path) -> list[Row]:
    """The rows of the newest commit."""
    rows = read_rows(results / "quantized_linear.csv")
    return [row for row in rows if row["commit"] == rows[-1]["commit"]]


def product_rows(results: Path) -> Table:
    """A row for each shape and product, microseconds for each number of rows."""
    took = {
        (row["shape"].split(" x ", 1)[1], row["implementation"], int(row["rows"])): 1e3 * float(row["ms"])
        for row in newest_run(results)
    }
    counts = sorted({count for _, _, count in took})
    rows = []
    for shape, name in dict.fromkeys((shape, name) for shape, name, _ in took):
        found = (took.get((shape, name, count)) for count in counts)
        cells = ["–" if each is None else f"{each:.1f}" if each < 1e3 else f"{each:,.0f}" for each in found]
        rows.append([shape.replace(" x ", " → "), told(name), *cells])
    return ["inputs → outputs", "µs", *(f"{count:,} row{'s' if count > 1 else ''}" for count in counts)], rows


def told(name: str) -> str:
    """Whose a product is."""
    return name if name in TORCHS or name.endswith(")") else f"ours, {name}"


def products_measured(results: Path) -> str:
    """Where: the newest run's commit, torch and copy bandwidth."""
    row = newest_run(results)[-1]
    device = {"cuda": "NVIDIA H200"}.get(row["device"], row["device"])  # what first runs wrote
    copied = f"{float(row['copy_gb_s']):,.0f} GB/s"
    return f"On {device}, torch {row['torch']}, at `{row['commit']}`; a plain copy moves {copied}."
