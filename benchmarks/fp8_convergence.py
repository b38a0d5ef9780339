"""What fp8 matmuls cost in loss: the same steps on real text in bf16 and in fp8, scaled per tensor and per row.

The model, the text and the steps are those of optimizer_states.py: ten layers of SmolLM2-135M's shape in bf16 with
float32 masters on a GPU, nano-llama in float32 on a CPU, where products of 8-bit codes are computed in float32. Runs in
bf16 drift apart by rounding alone: one whose layers work in two tiles, exact but in another order, shows how far.

    python benchmarks/fp8_convergence.py --results DIR
"""

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from optimizer_states import LAST, Curve, Variant, shallow, text_rows, train
from results import RESULTS, append_row

from tightfit.jobs.levers import Levers
from tightfit.report.curves import smoothed

VARIANTS = {
    "native": Variant(Levers()),
    "native, in tiles": Variant(Levers(tiles=2)),
    "fp8-tensor": Variant(Levers(matmul="fp8-tensor")),
    "fp8-row": Variant(Levers(matmul="fp8-row")),
}
COLORS = ("#1f5fa8", "#888888", "#d1495b", "#2a9d5c")


def distances(curve: Curve, native: Curve) -> list[float]:
    """Loss above the native run's, step by step."""
    return [a - b for a, b in zip(curve.losses, native.losses, strict=True)]


def draw(curves: dict[str, Curve], path: Path, title: str) -> None:
    """The curves above, their distance from the native one below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1), constrained_layout=True
    )
    for (name, curve), color in zip(curves.items(), COLORS, strict=False):
        top.plot(smoothed(curve.losses), label=name, color=color, linewidth=1.2)
        bottom.plot(smoothed(distances(curve, curves["native"])), color=color, linewidth=1.2)
    top.set(ylabel="training loss (moving average)", title=title)
    bottom.set(xlabel="step", ylabel="loss − native")
    top.legend(frameon=False)
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def report(name: str, curve: Curve, native: Curve, common: dict[str, Any]) -> dict[str, Any]:
    """A row of the results."""
    apart = distances(curve, native)
    return common | {
        "matmul": name,
        "final_loss": f"{mean(curve.losses[-LAST:]):.4f}",
        "above_native": f"{mean(apart[-LAST:]):.4f}",
        "mean_difference": f"{mean(map(abs, apart)):.4f}",
        "largest_difference": f"{max(map(abs, apart)):.4f}",
        "step_ms_p50": f"{curve.step_ms:.1f}",
    }


def main(folder: Path, commit: str | None, steps: int, length: int, model: str | None) -> None:
    """Train all of them and append a row for each."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model or ("smollm2-135m" if device.type == "cuda" else "nano-llama")
    spec = shallow(model)
    rows = text_rows(folder, spec, length)
    print(f"{device}: {model}, {spec.layers} layers, {steps} steps of 8 × {length} each", flush=True)
    common = {"model": model, "layers": spec.layers, "steps": steps, "sequence_length": length, "batch": 8}
    curves: dict[str, Curve] = {}
    for name, variant in VARIANTS.items():
        curves[name] = train(rows, spec, variant, steps, device)
        row = report(name, curves[name], curves["native"], common)
        print(row, flush=True)
        append_row("fp8_convergence", row, folder=folder, commit=commit)
    draw(curves, folder / "fp8_convergence.png", f"{model}: the same {steps} steps, natively and in fp8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--model")
    given = parser.parse_args()
    main(given.results, given.commit, given.steps, given.seq, given.model)
