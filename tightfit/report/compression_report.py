"""The report that a compression writes beside the model: report.json, and report.png with the error of every layer.

`tightfit evaluate --against` adds its measurements to the report of a directory that has one. Programs that load the
model read neither file.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from tightfit.bounded_files import LARGEST_RECORD_BYTES, read_json
from tightfit.durable import durable_file
from tightfit.errors import UserError
from tightfit.report.figure import GIB, panels, plain
from tightfit.report.tables import finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tightfit.compress.comparison import Comparison
    from tightfit.compress.report import CompressionReport

REPORT_FILE = "report.json"
PICTURE_FILE = "report.png"
COLORS = ("#1f5fa8", "#d1495b", "#2a9d4e", "#e68613", "#7b4fa3", "#0f8b8d", "#8c6d46", "#c05299", "#5b8e7d", "#888888")
Record = dict[str, Any]
NOT_OURS = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)
"""Errors that reading or drawing a report.json of another program may raise."""


@dataclass(frozen=True)
class Compared:
    """A model, the bytes of its weights, and its comparison with the original."""

    model: str
    weight_bytes: int
    result: "Comparison"

    def to_json(self) -> Record:
        """As plain data."""
        facts = {"perplexity": self.result.perplexity, "original_perplexity": self.result.original_perplexity}
        return {"model": self.model, "weight_bytes": self.weight_bytes, **asdict(self.result), **facts}


def write_report(report: "CompressionReport", folder: Path) -> None:
    """Write both files into `folder`; if that fails, only warn: the model itself is written."""
    _write(folder, {**asdict(report), "comparisons": []})


def add_comparison(folder: Path, compared: Compared, against: str, data: Sequence[str]) -> None:
    """Add the result of `evaluate --against` to the report of the compressed model in `folder`, if it has one."""
    if not (folder / REPORT_FILE).is_file():
        return
    measured = {"against": against, "data": list(data), **compared.to_json()}
    try:
        record = read_json(folder / REPORT_FILE, LARGEST_RECORD_BYTES, "a report", remedy="it gets nothing added")
        others = [each for each in record["comparisons"] if (each["against"], each["data"]) != (against, list(data))]
        _write(folder, {**record, "comparisons": [*others, measured]})
    except (UserError, *NOT_OURS):
        print(f"tightfit: warning: {folder / REPORT_FILE} is no report of tightfit and stays as it is", file=sys.stderr)


def _write(folder: Path, record: Record) -> None:
    """Write picture and record; the picture first, so that a record that cannot be drawn is not written."""
    text = json.dumps(finite(record), indent=2, default=str, ensure_ascii=False, allow_nan=False)
    try:
        draw_errors(record, folder / PICTURE_FILE)
        with durable_file(folder / REPORT_FILE) as file:
            file.write_text(text + "\n", encoding="utf-8")
    except (OSError, UserError) as error:
        print(f"tightfit: warning: cannot write the report in {folder}: {error}", file=sys.stderr)


def draw_errors(record: Mapping[str, Any], path: Path) -> None:
    """Draw the errors of every matrix and of whole layers over the layer's number."""
    layers = record["layers"]
    names = sorted({name for layer in layers for name in layer["errors"]})
    with panels(path, 1, 1, width=8, height=4.6) as (figure, grid):
        axes = grid[0][0]
        for number, name in enumerate(names):
            color = COLORS[number % len(COLORS)]
            _line(axes, [(layer["index"], layer["errors"].get(name)) for layer in layers], name, color, 1.2)
        _line(axes, [(layer["index"], layer["layer_error"]) for layer in layers], "whole layer", "#111111", 2.2)
        _line(axes, [(len(layers), record.get("head_error"))], "output projection", "#888888", 1.2)
        what = "outputs" if record["predicted"].get("calibration") else "weights"
        axes.set(yscale="log", xlabel="layer", ylabel=f"squared change of {what} over squared {what}")
        axes.yaxis.set_major_formatter("{x:.0e}")
        axes.yaxis.set_minor_formatter("")
        axes.xaxis.get_major_locator().set_params(integer=True)
        plain(axes)
        if axes.lines:
            figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        axes.set_title("\n".join(_title(record)), fontsize=9, loc="left")


def _line(axes: "Axes", points: Sequence[tuple[int, float | None]], name: str, color: str, width: float) -> None:
    shown = [(index, error) for index, error in points if error is not None and error > 0]
    if shown:
        x, y = zip(*shown, strict=True)
        axes.plot(x, y, color=color, linewidth=width, marker="o", markersize=3, label=name)


def _title(record: Mapping[str, Any]) -> list[str]:
    size, before = record["measured"]["result_bytes"], record["predicted"]["original_bytes"]
    recipe = shorten(record["recipe"], 60, placeholder=" …")
    lines = [f"{recipe}: {size / GIB:.3f} GiB, {before / GIB:.3f} in 16 bits"]
    for each in record["comparisons"][-2:]:
        names = ", ".join(Path(name).name for name in each["data"])
        told = f"perplexity {each['perplexity']:.2f}, {each['original_perplexity']:.2f} of the original"
        lines.append(f"{told}; KL {each['kl']['mean']:.4f} ({each['tokens']:,} tokens of {names})")
    return lines


def draw_sizes(found: Sequence[Compared], original: tuple[str, int], path: Path) -> None:
    """Draw perplexity and KL divergence from the original over size, one point per model."""
    name, its_bytes = original
    with panels(path, 1, 2, width=11, height=4.6) as (figure, grid):
        left, right = grid[0]
        perplexity = found[0].result.original_perplexity
        left.plot([its_bytes / GIB], [perplexity], "s", color="#888888")
        left.axhline(perplexity, color="#888888", linewidth=0.8, linestyle=":")
        _name(left, Path(name).name, its_bytes / GIB, perplexity)
        for axes, values in (
            (left, [each.result.perplexity for each in found]),
            (right, [each.result.kl.mean for each in found]),
        ):
            sizes = [each.weight_bytes / GIB for each in found]
            axes.plot(sizes, values, "o", color=COLORS[0])
            for each, x, y in zip(found, sizes, values, strict=True):
                _name(axes, Path(each.model).name, x, y)
            axes.margins(x=0.2, y=0.15)
            axes.set_xlabel("weights (GiB)")
            plain(axes)
        left.set_ylabel("perplexity")
        right.set_ylabel("KL from the original (nats a token)")
        figure.suptitle(f"{found[0].result.tokens:,} tokens in {found[0].result.rows} rows", fontsize=9)


def _name(axes: "Axes", name: str, x: float, y: float) -> None:
    axes.annotate(name, (x, y), textcoords="offset points", xytext=(5, 5), fontsize=8)
