"""`tightfit picture`: memory, ZeRO stages, timelines and pipeline schedules, drawn."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tightfit.cli.options import count_option, refuse_given, takes_options
from tightfit.cli.outputs import is_picture, refuse_foreign

if TYPE_CHECKING:
    from tightfit.report.memory import Card

picture = typer.Typer(name="picture", help="Draw memory and pipeline schedules as PNG or SVG.", no_args_is_help=True)


def _free_or_ours(path: Path) -> Path:
    refuse_foreign(path, is_picture, "a picture")
    return path


Out = Annotated[Path, typer.Option(callback=_free_or_ours, help="Where to write it; the name ends in .png or .svg.")]
Lengths = Annotated[list[int] | None, count_option("--seq", text="A sequence length. May be repeated.")]
On = Annotated[list[str] | None, typer.Option("--on", help="A card whose line is drawn. May be repeated.")]
CardGb = Annotated[float | None, typer.Option("--card-gb", help="Draw the line of a card of this many GB.")]
Recompute = Annotated[int, typer.Option(help="Recompute every n-th layer: 1 for all, 0 for none.")]


@picture.callback()
def _picture() -> None: ...


def _cards(names: list[str] | None, card_gb: float | None) -> "list[Card]":
    from tightfit.errors import UserError
    from tightfit.hardware.machine import parse_machine
    from tightfit.report.memory import Card

    cards = [parse_machine(name).accelerator for name in names or []]
    found = [Card(card.name, card.memory_bytes) for card in cards]
    if card_gb is not None:
        if not 0 < card_gb < 1e6:
            raise UserError(f"--card-gb is {card_gb:g}; give a card's memory in GB, such as 80")
        found.append(Card(f"{card_gb:g} GB", round(card_gb * 1e9)))
    return found


@picture.command()
def memory(
    out: Out,
    model: Annotated[list[str] | None, typer.Option("--model", help="A preset. May be repeated.")] = None,
    seq: Lengths = None,
    on: On = None,
    card_gb: CardGb = None,
    checkpoint_every: Recompute = 0,
    layer: Annotated[
        Literal["ours", "classic"], typer.Option(help="`classic` keeps what GPT's layer did, all scores included.")
    ] = "ours",
) -> None:
    """Parameters, gradients, optimizer states and activations over sequence lengths, with the card's line.

    \b
    tightfit picture memory --model llama-3.1-8b --model llama-3.1-70b --on H100-80GB --out memory.png
    """
    from tightfit.errors import UserError
    from tightfit.jobs.levers import Levers
    from tightfit.models.resolve import resolve_spec
    from tightfit.report.memory import LENGTHS, draw_memory

    if layer == "classic" and checkpoint_every:
        raise UserError(f"--checkpoint-every is {checkpoint_every}, but a classic layer keeps all; leave one out")
    names = model or ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"]
    specs = {name: resolve_spec(name) for name in names}
    levers = Levers(checkpoint_every=checkpoint_every)
    draw_memory(specs, seq or LENGTHS, _cards(on, card_gb), out, levers=levers, layer=layer)
    typer.echo(f"picture in {out}")


@picture.command()
def zero(
    out: Out,
    model: Annotated[str, typer.Option("--model", help="A preset.")] = "llama-3.1-8b",
    gpus: Annotated[int, typer.Option(help="Data-parallel ranks.", min=1)] = 8,
    seq: Lengths = None,
    on: On = None,
    card_gb: CardGb = None,
    checkpoint_every: Recompute = 0,
) -> None:
    """The same under plain data parallelism and ZeRO-1, 2 and 3.

    \b
    tightfit picture zero --model llama-3.1-8b --gpus 8 --on H100-80GB --out zero.png
    """
    from tightfit.jobs.levers import Levers
    from tightfit.models.resolve import resolve_spec
    from tightfit.report.memory import LENGTHS, draw_zero

    levers = Levers(checkpoint_every=checkpoint_every)
    draw_zero(model, resolve_spec(model), gpus, seq or LENGTHS, _cards(on, card_gb), out, levers=levers)
    typer.echo(f"picture in {out}")


@picture.command()
def timeline(
    out: Out,
    model: Annotated[str, typer.Option("--model", help="A preset, or a directory with a config.json.")],
    seq: Annotated[int, count_option("--seq", text="Tokens per row.")] = 4096,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16", "pure-bf16"], typer.Option(help="What weights and activations are in.")
    ] = "bf16",
    global_batch: Annotated[int | None, count_option(text="Rows per step; by default one micro-batch a rank.")] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option("-o", "--pin", help="A field: -o layout.zero=3 -o levers.checkpoint_every=1. May be repeated."),
    ] = None,
) -> None:
    """Allocated and reserved memory over one training step with its phases, simulated: no GPU needed.

    \b
    tightfit picture timeline --model llama-3.2-1b --seq 8192 --out timeline.png
    tightfit picture timeline --model llama-3.2-1b --seq 8192 -o levers.checkpoint_every=1 --out timeline.png
    """
    from tightfit.report.figure import check_picture_path

    check_picture_path(out)
    from tightfit.models.resolve import resolve_spec
    from tightfit.plan.search.pins import parse_pins
    from tightfit.report.simulated import simulate_timeline
    from tightfit.report.timeline import draw_timelines

    spec, pins = resolve_spec(model), parse_pins(pin or [])
    found = simulate_timeline(spec, pins, sequence_length=seq, precision=precision, global_batch=global_batch)
    title = f"{model}, one step of {seq:,}-token rows, {precision}" + (f", {pins}" if pins else "")
    draw_timelines({"simulated": found}, title, out)
    typer.echo(f"peak {found.peak_bytes / 2**30:.2f} GiB allocated, {found.peak_reserved_bytes / 2**30:.2f} reserved")
    typer.echo(f"picture in {out}")


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The options of `tightfit picture pipeline`."""

    out: Out
    ranks: Annotated[int, typer.Option(help="Pipeline ranks.", min=1)] = 4
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step.", min=1)] = 8
    schedule: Annotated[
        list[str] | None,
        typer.Option("--schedule", help="Only gpipe, 1f1b, interleaved, zero-bubble, zb-v or 2bw. May be repeated."),
    ] = None
    run: Annotated[
        Path | None, typer.Option(help="Draw what the ranks of this run did, as recorded in its third step.")
    ] = None


@picture.command()
@takes_options
def pipeline(options: PipelineOptions) -> None:
    """Pipeline schedules with their bubbles: who works on which micro-batch when.

    \b
    tightfit picture pipeline --ranks 4 --micro-batches 8 --out pipeline.png
    tightfit picture pipeline --run runs/mine --out pipeline.png
    """
    out = options.out
    if options.run is not None:
        from tightfit.report.pipeline import draw_record, read_record

        refuse_given(options, ("ranks", "micro_batches", "schedule"), "but a run has its own; leave it or --run out")
        record = read_record(options.run)
        draw_record(record, out)
        typer.echo(
            f"{record.schedule}: ranks waited {record.waited:.1%} of the time, the formula says {record.formula:.1%}"
        )
        return typer.echo(f"picture in {out}")
    from tightfit.report.pipeline import draw_pipeline
    from tightfit.report.pipeline_schedule import SCHEDULES, checked

    idle = draw_pipeline(checked(options.schedule or SCHEDULES), options.ranks, options.micro_batches, out)
    for name, share in idle.items():
        typer.echo(f"{name}: ranks wait {share:.1%} of the time")
    typer.echo(f"picture in {out}")
