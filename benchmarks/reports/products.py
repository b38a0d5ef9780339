"""The tables of products with packed weights in docs/kernels.md: ours beside other packages', of the newest run, and
those of some rows on Hopper beside what other cards get."""

from pathlib import Path

from benchmarks.reports.compression import Row, Table, read_rows
from tightfit.kernels.quantized.packed_blocks import Blocks, blocks_for

TORCHS = ("bf16", "torch int4 g128")
"""Names of what torch itself brings; others' end with their package and version in brackets."""


H200_PROCESSORS = 132
EVERYWHERE = {"bf16": "bf16", "other cards'": "ours, other cards"}
"""Ways in results/packed_blocks.csv that are not of kernels/quantized/packed_blocks.py, and their words here."""


def newest_run(results: Path, name: str = "quantized_linear") -> list[Row]:
    """The rows of the newest commit."""
    rows = read_rows(results / f"{name}.csv")
    return [row for row in rows if row["commit"] == rows[-1]["commit"]]


def of_others(results: Path) -> list[Row]:
    """The newest rows of other packages, which are not in every run."""
    rows = [row for row in read_rows(results / "quantized_linear.csv") if row["implementation"].endswith(")")]
    return [row for row in rows if row["commit"] == rows[-1]["commit"]]


def product_rows(results: Path) -> Table:
    """A row for each shape and product, microseconds for each number of rows."""
    took = {
        (row["shape"].split(" x ", 1)[1], row["implementation"], int(row["rows"])): 1e3 * float(row["ms"])
        for row in (*newest_run(results), *of_others(results))
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
    """Where: the newest run's commit, torch and copy bandwidth, and the run of other packages."""
    row, others = newest_run(results)[-1], of_others(results)[-1]["commit"]
    device = {"cuda": "NVIDIA H200"}.get(row["device"], row["device"])  # what first runs wrote
    copied = f"{float(row['copy_gb_s']):,.0f} GB/s"
    elsewhere = "" if others == row["commit"] else f" Other packages were in the run at `{others}`."
    return f"On {device}, torch {row['torch']}, at `{row['commit']}`; a plain copy moves {copied}.{elsewhere}"


def block_rows(results: Path) -> Table:
    """A row for each shape and way, microseconds for each number of rows at which what is chosen was measured."""
    took: dict[tuple[str, str], dict[int, str]] = {}
    for row in newest_run(results, "packed_blocks"):
        count, shape = int(row["rows"]), f"{row['inputs']} → {row['outputs']}"
        if row["kernel"] in EVERYWHERE:
            took.setdefault((shape, EVERYWHERE[row["kernel"]]), {})[count] = row["us"]
        elif "overlap" not in row["kernel"] and is_chosen(row):
            took.setdefault((shape, "ours, Hopper"), {})[count] = row["us"]
    counts = sorted({count for (_, way), each in took.items() if way == "ours, Hopper" for count in each if count > 16})
    cells = [[*key, *(f"{float(each[count]):.1f}" for count in counts)] for key, each in took.items()]
    return ["inputs → outputs", "µs", *(f"{count} rows" for count in counts)], cells


def is_chosen(row: Row) -> bool:
    """Whether the row's cut is what `blocks_for` gives on an H200."""
    rule = blocks_for(int(row["rows"]), int(row["outputs"]), int(row["inputs"]), H200_PROCESSORS)
    return [row[name] for name in Blocks._fields] == [str(value) for value in rule]


def blocks_measured(results: Path) -> str:
    """Where: the newest run's card, torch and commit."""
    row = newest_run(results, "packed_blocks")[-1]
    return f"On {row['device']}, torch {row['torch']}, at `{row['commit']}` (`benchmarks/packed_blocks.py`)."
