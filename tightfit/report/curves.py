"""The loss curve of a run as a picture, from its metrics file."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.durable import durable_file
from tightfit.train.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHING = 0.9
FEW_STEPS = 20
"""Fewer steps are drawn as points, without a moving average."""
Rows = list[dict[str, Any]]


def smoothed(values: list[float]) -> list[float]:
    """Exponential moving average with bias correction, so that the curve starts where the data does."""
    average, averages = 0.0, []
    for count, value in enumerate(values, 1):
        average = SMOOTHING * average + (1 - SMOOTHING) * value
        averages.append(average / (1 - SMOOTHING**count))
    return averages


def draw_loss_curve(run: Path) -> Path | None:
    """Draw `run/loss.png`: training loss, its average, held-out loss, and the learning rate; None without any rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_metrics(run / "metrics.jsonl")
    trained = [row for row in rows if "loss" in row]
    held_out = [row for row in rows if "held_out_loss" in row]
    if not trained:
        return None
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 5.5), sharex=True, height_ratios=(4, 1), constrained_layout=True
    )
    _draw_losses(top, trained, held_out)
    top.set(ylabel="loss (nats per token)", title=f"{run.name}: {len(trained)} logged step{'s' * (len(trained) != 1)}")
    top.legend(frameon=False)
    mark = "o" if len(trained) < FEW_STEPS else None
    rates = [row["lr"] for row in trained]
    bottom.plot([row["step"] for row in trained], rates, color="#555555", linewidth=1.2, marker=mark, markersize=3)
    bottom.set(xlabel="step", ylabel="learning rate")
    bottom.set_ylim(bottom=0)
    bottom.xaxis.get_major_locator().set_params(integer=True)  # there is no step 1.5
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    with durable_file(run / "loss.png") as file:
        figure.savefig(file, format="png", dpi=130)
    pyplot.close(figure)
    return run / "loss.png"


def _draw_losses(axes: "Axes", trained: Rows, held_out: Rows) -> None:
    steps, losses = [row["step"] for row in trained], [row["loss"] for row in trained]
    if len(steps) < FEW_STEPS:
        axes.plot(steps, losses, color="#1f5fa8", linewidth=1.2, marker="o", markersize=4, label="training loss")
    else:
        axes.plot(steps, losses, color="#9db8d9", linewidth=0.8, label="training loss")
        axes.plot(steps, smoothed(losses), color="#1f5fa8", linewidth=1.6, label="its moving average")
    if not held_out:
        return
    x, y = [row["step"] for row in held_out], [row["held_out_loss"] for row in held_out]
    axes.plot(x, y, color="#d1495b", marker="o", markersize=4, linewidth=1.4, label="held-out loss")
    axes.annotate(
        f"{y[-1]:.3f}", (x[-1], y[-1]), textcoords="offset points", xytext=(-8, 8), ha="right", color="#d1495b"
    )
