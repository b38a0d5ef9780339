"""Draws size against perplexity of every method in benchmarks/results/compress_quality.csv, ours and other packages'.

Rows over most windows of the length are drawn, the newest of each method. Below the line through our best rows nobody
is better at the same size.

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
MOST_PERPLEXITY_RATIO = 4.0
"""Rows that lose more than this are left out of the picture, and kept in the table."""


def best_line(rows: list[dict[str, str]]) -> list[tuple[float, float]]:
    """Our rows that no smaller one of ours beats."""
    best: list[tuple[float, float]] = []
    own = [(float(r["bits_per_weight"]), float(r["perplexity"])) for r in rows if r["package"] == "tightfit"]
    for bits, perplexity in sorted(own):
        if not best or perplexity < best[-1][1]:
            best.append((bits, perplexity))
    return best


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """One mark a row, its method beside it."""
    original = float(rows[0]["original_perplexity"])
    shown = [row for row in rows if float(row["perplexity"]) < MOST_PERPLEXITY_RATIO * original]
    with panels(path, 1, 1, width=10, height=6) as (_, grid):
        axes: Any = grid[0][0]
        for package, color in COLORS.items():
            own = [row for row in shown if row["package"] == package]
            at = [float(row["bits_per_weight"]) for row in own], [float(row["perplexity"]) for row in own]
            axes.plot(*at, "o" if package == "tightfit" else "x", color=color, label=package, markersize=6)
            for row, bits, perplexity in zip(own, *at, strict=True):
                name = row["method"] if row["method"] != "gguf" else row["scheme"].split(",")[0]
                side = 5 if package == "tightfit" else -5
                where = {"xytext": (side, 3), "textcoords": "offset points", "ha": "left" if side > 0 else "right"}
                axes.annotate(name, (bits, perplexity), fontsize=7, color=color, **where)
        axes.plot(*zip(*best_line(shown), strict=True), color=COLORS["tightfit"], linewidth=0.8)
        axes.axhline(original, color="#888888", linewidth=0.8, linestyle=":")
        axes.annotate("the original", (0.5, original), xycoords=("axes fraction", "data"), fontsize=7, va="bottom")
        axes.set(yscale="log", xlabel="bits a coded weight, scales included", ylabel="perplexity (logarithmic)")
        axes.yaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_minor_formatter("{x:.0f}")
        axes.set_title(f"SmolLM2-135M-Instruct, WikiText-2, {rows[0]['windows']} windows of {rows[0]['length']}")
        axes.legend(frameon=False)
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
