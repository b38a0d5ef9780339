"""The screen of a run that ran out of GPU memory: the failed allocation, what held the memory, and what to change."""

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table

from tightfit.report.escaping import escape
from tightfit.report.tables import gib
from tightfit.train.out_of_memory import Advice, Shortage

BAR_CELLS = 40


def print_shortage(found: Shortage, console: Console | None = None) -> None:
    """Print one screen to stderr."""
    console = console or Console(highlight=False, stderr=True)
    title = f"[bold red]Out of GPU memory[/bold red] in step {found.step}, {found.phase}"
    body = Group(_what(found), "", _held(found), "", *_ways(found), "", f"[bold]{escape(_capital(found.safe))}.[/bold]")
    console.print(Panel(body, title=title, title_align="left", border_style="red", width=min(100, console.width)))


def _what(found: Shortage) -> str:
    where = " in ".join(escape(part) for part in (found.operation, found.module) if part)
    return (
        f"A tensor of [bold]{gib(found.wanted_bytes)}[/bold] was requested by {where or 'an operation'};\n"
        f"[bold]{gib(found.missing_bytes)}[/bold] of that were missing."
    )


def _held(found: Shortage) -> Table:
    """A bar per component."""
    held = found.held.by_component(found.phase)
    table = Table.grid(padding=(0, 1))
    most = max(held.values(), default=1)
    for component, size in sorted(held.items(), key=lambda item: -item[1]):
        bar = "█" * max(1, round(BAR_CELLS * size / most))
        table.add_row(f"{component}", f"[bold]{gib(size)}[/bold]", f"[cyan]{bar}[/cyan]")
    return table


def _ways(found: Shortage) -> list[str]:
    ways = []
    if found.advice is not None:
        ways.append(f"The cheapest lever that makes room: [green]{escape(' '.join(found.advice.overrides))}[/green]")
        ways.append(f"  predicted: {_price(found.advice)}")
    else:
        ways.append("No lever alone makes room for this on one card.")
    if found.micro_batch > 1:
        ways.append(f"Or fewer rows at a time: [green]-o layout.micro_batch={found.micro_batch // 2}[/green]")
    ways.append("Or let the planner choose: [green]tightfit train … --fit[/green]")
    return ways


def _price(advice: Advice) -> str:
    time = "as fast" if advice.slower < 0.01 else f"{advice.slower:.0%} more time a step"
    return f"{gib(advice.gpu_bytes)} on the GPU, {time}"


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
