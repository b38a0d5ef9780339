"""What a finished run prints: steps, loss, speed, memory, a sample, and the next commands."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.panel import Panel

from tightfit.jobs.job import Job
from tightfit.report.curves import draw_loss_curve
from tightfit.report.escaping import escape
from tightfit.report.next_commands import near, next_commands
from tightfit.report.prediction import Prediction, print_prediction
from tightfit.report.tables import count_name, first_steps, gib, print_json
from tightfit.train.loop import RunResult


def print_result(result: RunResult, job: Job, *, as_json: bool, prediction: Prediction | None = None) -> None:
    """Draw the loss curve and print the summary, with the plan's prediction where the run followed a plan."""
    picture = _loss_curve(result.run)
    if as_json:
        planned = {"prediction": prediction.to_json()} if prediction is not None else {}
        return print_json({**asdict(result), "loss_curve": picture, **planned})
    console = Console()
    for name, value in _facts(result, picture):
        console.print(f"[cyan]{name:>14}[/cyan]  {escape(value)}", highlight=False, soft_wrap=True)
    if prediction is not None:
        print_prediction(prediction)
    for prompt, continuation in result.samples:
        text = f"[bold]{escape(prompt)}[/bold]{escape(continuation)}"
        console.print(Panel(text, title="a sample", title_align="left", border_style="dim"), highlight=False)
    console.print("Next:", *map(escape, next_commands(result, job)), sep="\n  ", highlight=False, soft_wrap=True)


def _loss_curve(run: Path) -> Path | None:
    """Draw the picture; if it cannot be written, only warn: the run itself has ended well."""
    try:
        return draw_loss_curve(run)
    except OSError as error:
        print(f"tightfit: warning: cannot write {run / 'loss.png'}: {error.strerror or error}", file=sys.stderr)
        return None


def _facts(result: RunResult, picture: Path | None) -> Iterator[tuple[str, str]]:
    why = " (stopped on request)" if result.stopped_by is not None else ""
    why = " (stopped early: the held-out loss no longer fell)" if result.stopped_early else why
    yield "steps", f"{result.step} of {result.steps}{why}"
    yield "model", f"{count_name(result.params)} parameters, {result.precision}, {result.device}"
    if result.end is not None:
        start = f"{result.start.loss:.3f} → " if result.start is not None else ""
        yield "held-out loss", f"{start}{result.end.loss:.3f} nats/token (perplexity {result.end.perplexity:,.1f})"
    if result.train_seconds:
        yield "speed", _speed(result)
    yield "peak memory", gib(result.peak_bytes)
    yield from _experts(result)
    yield "checkpoint", near(result.checkpoint)
    if picture is not None:
        yield "loss curve", near(picture)


def _experts(result: RunResult) -> Iterator[tuple[str, str]]:
    """A line per routed layer: how unevenly its experts were used."""
    for number, load in enumerate(result.expert_load):
        idle = f", {load.idle} got none" if load.idle else ""
        idle += f", {load.dropped:.1%} of tokens dropped" if load.dropped else ""
        told = f"layer {load.layer}: busiest {load.busiest:.2f} × the mean, quietest {load.quietest:.2f} ×{idle}"
        yield "expert load" if number == 0 else "", told


def _speed(result: RunResult) -> str:
    """Speed after the warm-up, whose steps and seconds are given separately."""
    said = f"{result.tokens_per_second:,.0f} tokens/s over {result.train_seconds:.0f} s of training"
    if result.warmup_steps:
        said += f", of which {first_steps(result.warmup_steps)} took {result.warmup_seconds:.1f} s to warm up"
    if result.mfu is not None:
        said += f"; {result.mfu:.0%} of the card's FLOP/s (MFU)"
    return said
