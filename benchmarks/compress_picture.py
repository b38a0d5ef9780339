"""Draws size against loss of every method in benchmarks/results/compress_quality.csv, ours and other packages'.

Rows over most windows of the length are drawn, the newest of each method: perplexity, and the divergence from the
original, which tells apart what is close to it. The lines go through our best rows, which are named.

    python -m benchmarks.compress_picture --length 512
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.reports.compression import quality_measured
from benchmarks.rows import RESULTS, picture_folder
from tightfit.report.figure import panels

COLORS = {
    "tightfit": "#1f5fa8",
    "llm-compressor": "#d1495b",
    "gptqmodel": "#e68613",
    "hqq": "#2a9d4e",
    "auto-round": "#0f8b8d",
    "torchao": "#7b4fa3",
    "bitsandbytes": "#8c6d46",
    "llama.cpp": "#111111",
}
MOST_PERPLEXITY_RATIO = 4.5
"""Rows that lose more than this are left out of the picture, and kept in the table."""


def best_line(rows: list[dict[str, str]], what: str) -> list[dict[str, str]]:
    """Our rows that no smaller one of ours beats."""
    best: list[dict[str, str]] = []
    for row in sorted(rows, key=lambda row: (float(row["bits_per_weight"]), float(row[what]))):
        if row["package"] == "tightfit" and (not best or float(row[what]) < float(best[-1][what])):
            best.append(row)
    return best


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """Perplexity and KL over size, one mark a row."""
    original = float(rows[0]["original_perplexity"])
    shown = [row for row in rows if float(row["perplexity"]) < MOST_PERPLEXITY_RATIO * original]
    shown = [row for row in shown if float(row["kl"]) > 0]  # these weights were in Q4_1 once, which loses nothing
    with panels(path, 1, 2, width=14, height=6) as (figure, grid):
        for axes, what in zip(grid[0], ("perplexity", "kl"), strict=True):
            _panel(axes, shown, what)
        grid[0][0].axhline(original, color="#888888", linewidth=0.8, linestyle=":")
        grid[0][0].annotate("the original", (7, original), fontsize=8, va="bottom", color="#555555")
        grid[0][0].legend(frameon=False)
        title = f"SmolLM2-135M-Instruct, WikiText-2, {rows[0]['windows']} windows of {rows[0]['length']} tokens"
        figure.suptitle(title)


def _panel(axes: Any, rows: list[dict[str, str]], what: str) -> None:
    def place(row: dict[str, str]) -> tuple[float, float]:
        return float(row["bits_per_weight"]), float(row[what])

    for package, color in COLORS.items():
        if own := [place(row) for row in rows if row["package"] == package]:
            mark = "o" if package == "tightfit" else "x"
            axes.plot(*zip(*own, strict=True), mark, color=color, label=package, markersize=6, alpha=0.8)
    line = best_line(rows, what)
    axes.plot(*zip(*map(place, line), strict=True), color=COLORS["tightfit"], linewidth=0.8)
    for row in line:
        name = (
            row["method"] if "gguf" not in row["method"] else row["method"].replace("gguf", row["scheme"].split(",")[0])
        )
        where = {"xytext": (-4, -9), "textcoords": "offset points", "ha": "right"}
        axes.annotate(name, place(row), fontsize=7, color=COLORS["tightfit"], **where)
    shown = "perplexity" if what == "perplexity" else "KL from the original, nats a token"
    axes.set(
        yscale="log", xlabel="bits a coded weight, scales included", ylabel=f"{shown} (logarithmic)", xlim=(1.2, 8.9)
    )
    if what == "perplexity":
        axes.yaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = quality_measured(arguments.results / "compress_quality.csv", arguments.length)
    draw(rows, picture_folder(arguments.results) / "compress-quality.png")


if __name__ == "__main__":
    main()
