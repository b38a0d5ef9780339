"""What `tightfit compress` and `tightfit evaluate --against` print."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tightfit.counted import counted
from tightfit.models.quantized.matrices import HEAD
from tightfit.report.compression_report import PICTURE_FILE, Compared
from tightfit.report.tables import gib, limit_sentence, print_json

if TYPE_CHECKING:
    from tightfit.compress.comparison import Comparison, Interval
    from tightfit.compress.cost import CompressionCost
    from tightfit.compress.report import CompressionReport, LayerReport
    from tightfit.memory.ledger import Ledger


LONGEST_RECIPE = 300
"""The most characters of a recipe that are printed; report.json has all of a recipe that names every matrix."""


SPEED_PERIOD_S = 24 * 3600.0
"""Window of rich's estimate of the time left: all layers, as its default of 30 s is less than one layer may take."""


class CompressionProgress:
    """The announced cost, then a bar: layer, its error, time left. Plain lines where there is no terminal."""

    def __init__(self, quiet: bool) -> None:
        self.console = Console(stderr=True, quiet=quiet)
        self._bar = Progress(
            TextColumn("[bold]layer"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[told]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            speed_estimate_period=SPEED_PERIOD_S,
            disable=quiet or not self.console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, told="")

    def announce(self, cost: "CompressionCost") -> None:
        """Print the predicted cost, before anything is written."""
        ratio = cost.original_bytes / max(cost.result_bytes, 1)
        bits = f"{cost.bits_per_weight:.2f} bits a quantized weight, " if cost.bits_per_weight else ""
        self.console.print(
            f"will write {gib(cost.result_bytes)} ({bits}{ratio:.1f} "
            f"times smaller than 16 bits), about {gib(cost.memory_bytes)} of memory and {cost.flops / 1e12:.1f} TFLOP",
            highlight=False,
            soft_wrap=True,
        )
        if cost.ledger is not None:
            self.say(_fullest(cost.ledger))
        if cost.calibration:
            self.say(f"calibration: {cost.calibration}")
        self.say(_quality_to_come(cost))
        if cost.transformers_limit:
            self.say(limit_sentence(cost.transformers_limit))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def layer(self, done: int, total: int, report: "LayerReport") -> None:
        """Show layer `done` of `total`, after it is compressed."""
        found = report.errors.get(HEAD, report.layer_error)
        error = "" if found is None else f"error {found:.2e}"
        self._bar.update(self._task, completed=done, total=total, told=error)
        if not self.console.is_terminal:
            name = "output projection" if HEAD in report.errors else f"layer {done}/{total}"
            self.console.print(f"{name}  {error}  {report.seconds:.1f} s", highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def _quality_to_come(cost: "CompressionCost") -> str:
    """What is known of the loss in quality before anything is written."""
    if cost.kl is not None:
        return f"expected KL to the original {cost.kl:.4f} nats a token, of some rows; measured when done"
    if cost.calibration:
        return "no estimate of the loss in quality; KL to the original is measured on some of those rows when done"
    return "no estimate of the loss in quality, and no text to measure it with: tightfit evaluate --against"


def _fullest(ledger: "Ledger") -> str:
    """A sentence with the lines of the phase with the highest peak, largest first."""
    phase, rank = ledger.fullest()
    lines = sorted(ledger.at(phase, rank), key=lambda line: -line.bytes)
    told = ", ".join(f"{line.detail or line.component} {gib(line.bytes)}" for line in lines if line.bytes)
    return f"at the peak ({phase}): {told}"


def print_compression(report: "CompressionReport", *, as_json: bool) -> None:
    """Print errors by layer, and predicted and measured cost side by side."""
    if as_json:
        return print_json(asdict(report))
    names = sorted({name for layer in report.layers for name in layer.errors})
    title = f"relative squared error of {'outputs' if report.predicted.calibration else 'weights'}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.collapse_padding = True  # so that seven matrices go into 80 columns
    for column in ("layer", *(name.split(".", 1)[-1] for name in names), "whole", "s"):
        table.add_column(column, justify="right", no_wrap=True)
    for layer in report.layers:
        errors = (f"{layer.errors[name]:.1e}" if name in layer.errors else "" for name in names)
        whole = "" if layer.layer_error is None else f"{layer.layer_error:.1e}"
        table.add_row(str(layer.index), *errors, whole, f"{layer.seconds:.1f}")
    if report.head_error is not None:
        table.add_row(HEAD, *("" for _ in names), f"{report.head_error:.1e}", "")
    console = Console()
    console.print(table)
    console.print(_costs(report))
    resumed = f", layers from an earlier run: {report.resumed_layers}" if report.resumed_layers else ""
    told = f"wrote {report.path} ({shorten(report.recipe, LONGEST_RECIPE, placeholder=' …')}; {report.format}{resumed})"
    console.print(told, highlight=False, soft_wrap=True, markup=False)
    picture = report.path / PICTURE_FILE
    if picture.is_file():
        console.print(f"errors by layer: {picture}", highlight=False, soft_wrap=True, markup=False)


def _costs(report: "CompressionReport") -> Table:
    table = Table("", "predicted", "measured", box=None, padding=(0, 1))
    table.add_row("size", gib(report.predicted.result_bytes), gib(report.measured.result_bytes))
    whose = "whole process" if report.device == "cpu" else "GPU"
    table.add_row("peak memory", gib(report.predicted.memory_bytes), f"{gib(report.measured.memory_bytes)} ({whose})")
    expected, lost = report.predicted.kl, report.measured.kl
    told = "no text" if lost is None else f"{lost:.4f} (calibration rows)"
    table.add_row("KL to the original", "no estimate" if expected is None else f"{expected:.4f}", told)
    table.add_row("time", f"{report.predicted.flops / 1e12:.1f} TFLOP", f"{report.measured.seconds:.0f} s")
    return table


def print_comparison(found: Sequence[Compared], original: tuple[str, int], *, as_json: bool) -> None:
    """Print one compressed model beside its original, or several, each with the bytes of its weights."""
    if as_json:
        rows = [each.to_json() for each in found]
        several = {"against": original[0], "original_bytes": original[1], "models": rows}
        return print_json(rows[0] if len(rows) == 1 else several)
    Console().print(_one(found[0].result) if len(found) == 1 else _several(found, original))


def _one(result: "Comparison") -> Table:
    table = Table(
        "",
        "compressed",
        "original",
        "difference",
        title=f"{result.tokens:,} tokens in {counted(result.rows, 'row')}",
        title_justify="left",
    )
    table.add_row("loss (nats/token)", _told(result.loss), _told(result.original_loss), _told(result.loss_difference))
    change = result.perplexity / result.original_perplexity - 1
    table.add_row("perplexity", f"{result.perplexity:.4f}", f"{result.original_perplexity:.4f}", f"{change:+.2%}")
    table.add_row("KL divergence (nats/token)", _told(result.kl), "", "")
    table.add_row("same top-1 token", _told(result.agreement), "", "")
    return table


def _several(found: Sequence[Compared], original: tuple[str, int]) -> Table:
    first = found[0].result
    title = f"{first.tokens:,} tokens in {counted(first.rows, 'row')}"
    table = Table("", "weights", "perplexity", "KL", "same top-1 token", title=title, title_justify="left")
    table.add_row(Path(original[0]).name, gib(original[1]), f"{first.original_perplexity:.2f}", "", "")
    for each in found:
        result = each.result
        numbers = (f"{result.perplexity:.2f}", _told(result.kl), _told(result.agreement))
        table.add_row(Path(each.model).name, gib(each.weight_bytes), *numbers)
    return table


def _told(interval: "Interval") -> str:
    spread = "" if interval.half_width is None else f" ± {interval.half_width:.4f}"
    return f"{interval.mean:.4f}{spread}"
