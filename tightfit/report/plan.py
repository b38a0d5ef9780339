"""What `tightfit plan` prints: the verdict, memory and time by component, alternatives, or what has to change."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tightfit.counted import counted
from tightfit.jobs.lever_table import describe_levers
from tightfit.memory.ledger import Component, Ledger
from tightfit.plan.answer import Answer
from tightfit.plan.batch import Batch, batch_of, warning
from tightfit.plan.describe import describe_adapters, describe_layout
from tightfit.plan.plan import Plan
from tightfit.plan.serving.plan import Serving
from tightfit.report.console import output_console
from tightfit.report.escaping import escape
from tightfit.report.tables import count_name, gib, print_json

BAR_CELLS = 50
"""Width of the bar where there is room."""
BESIDE_BAR = 30
"""Columns beside the bar: indents and `1234.56 GiB of 1234.56 GiB`."""
BESIDE_LINE = 34
"""Columns beside the bar of one component: indents, its name and size."""
COLOURS: dict[Component, str] = {
    "weights": "blue",
    "master weights": "cyan",
    "gradients": "magenta",
    "optimizer states": "yellow",
    "key/value cache": "bright_green",
    "activations": "green",
    "logits and loss": "red",
    "inputs": "white",
    "communication": "bright_blue",
    "workspace": "bright_magenta",
    "allocator slack": "bright_black",
    "cuda context": "bright_red",
}


def print_answer(answer: Answer, *, as_json: bool, extra: Mapping[str, Any], lines: list[str]) -> None:
    """Print the whole answer; `extra` goes into the JSON object, `lines` are about files written."""
    if as_json:
        return print_json({**answer.to_json(), **extra})
    console = output_console()
    plan = answer.plan
    console.print(_verdict(plan))
    console.print(_facts(answer))
    console.print(_memory(plan.ledger, plan.machine.accelerator.memory_bytes, console.width))
    console.print(_times(plan))
    if answer.alternatives:
        console.print(_alternatives(answer))
    if "simulation" in extra:
        console.print(_simulation(plan, extra["simulation"]))
    if "estimators" in extra:
        console.print(_estimators(extra["estimators"]))
    for change in answer.changes:
        console.print(f"  would fit with {escape(str(change))}")
    for sentence in (*answer.notes, *lines):
        console.print(f"[dim]· {escape(sentence)}[/dim]", soft_wrap=True)


def _verdict(plan: Plan) -> Text:
    room, each = plan.machine.accelerator.memory_bytes, "" if plan.machine.is_cpu else " a GPU"
    text = Text(f"{plan.model} on {plan.machine.text}: ", style="bold")
    if plan.fits:
        text.append("fits", style="bold green")
        if plan.machine.host_bytes is None and plan.training_host_bytes > 2**30:
            text.append(f" if a node's host has {gib(plan.host_peak_bytes)}", style="bold yellow")
        text.append(f", {gib(plan.gpu_peak_bytes)} of {gib(room)}{each}")
        text.append(f", {_seconds(plan.step_seconds)} a step, {count_name(plan.tokens_per_second)} tokens/s")
        return text
    text.append("does not fit", style="bold red")
    if plan.missing_gpu_bytes > 0:
        text.append(f", {gib(plan.missing_gpu_bytes)} too much for {gib(room)}{each}")
    if plan.missing_host_bytes > 0:
        text.append(f", the host of a node is {gib(plan.missing_host_bytes)} short")
    return text.append(" in the nearest plan")


def _facts(answer: Answer) -> Table:
    plan = answer.plan
    table = Table.grid(padding=(0, 2))
    rows = [
        ("layout", describe_layout(plan.layout, alone="the CPU" if plan.machine.is_cpu else "one GPU")),
        ("levers", describe_levers(plan.levers)),
        ("precision", plan.workload.precision),
        *((("adapters", said),) if (said := describe_adapters(plan.workload)) else ()),
        ("batch", str(batch_of(plan.workload, plan.layout))),
    ]
    rows.append(("MFU", f"{plan.mfu:.1%} of the {plan.machine.accelerator.name}'s peak"))
    if plan.host_peak_bytes:
        training, saving = gib(plan.training_host_bytes), gib(plan.host_peak_bytes)
        rows.append(("host memory", f"{training} a node, {saving} while a checkpoint is written"))
    if plan.steps:
        total = plan.steps * plan.step_seconds
        hours = "" if plan.machine.is_cpu else f", {_gpu_hours(plan, total)}"
        rows.append(("the job", f"{counted(plan.steps, 'step')}, {_seconds(total)}{hours}"))
    for name, value in rows:
        table.add_row(f"[dim]{name}[/dim]", escape(value))
    return table


def _gpu_hours(plan: Plan, seconds: float) -> str:
    hours = plan.machine.ranks * seconds / 3600
    if hours >= 10:
        return f"{hours:,.0f} GPU hours"
    return f"{hours:.1f} GPU hours" if hours >= 0.1 else "less than 0.1 GPU hours"


def _memory(ledger: Ledger, room_bytes: int, columns: int) -> Group:
    """One bar of the peak against the card's memory, and a line per component, in a terminal of so many columns."""
    cells, longest = (max(1, min(BAR_CELLS, columns - beside)) for beside in (BESIDE_BAR, BESIDE_LINE))
    phase, rank = ledger.fullest()
    parts = ledger.by_component(phase, rank)
    scale = max(room_bytes, sum(parts.values()))
    bar = Text("  ")
    used = 0
    for component, held in parts.items():
        before = round(used / scale * cells)
        used += held
        bar.append("█" * (round(used / scale * cells) - before), style=COLOURS[component])
    edge = round(room_bytes / scale * cells)
    bar.append("░" * max(0, edge - round(used / scale * cells)), style="dim")
    bar.append(f"  {gib(used)} of {gib(room_bytes)}")
    table = Table.grid(padding=(0, 2))
    for component, held in parts.items():
        line = "█" * min(round(held / scale * cells), longest) or "▏"
        table.add_row(f"  {component}", gib(held), Text(line, style=COLOURS[component]))
    where = f", pipeline rank {rank}" if rank else ""
    return Group(Text(f"memory at its fullest ({phase}{where})", style="dim"), bar, table)


def _times(plan: Plan) -> Text:
    parts = [f"{name} {seconds / plan.step_seconds:.0%}" for name, seconds in plan.time.parts()]
    return Text("time of a step: " + ", ".join(part for part in parts if not part.endswith(" 0%")), style="dim")


def _alternatives(answer: Answer) -> Table:
    table = Table(title="Next best, one of each kind", title_justify="left", box=None, padding=(0, 1))
    for column in ("layout", "levers", "memory", "step", "against the plan"):
        table.add_column(column, overflow="fold")
    for each in answer.alternatives:
        slower = each.step_s / answer.plan.step_seconds - 1
        against = "as fast" if abs(slower) <= 0.02 else f"{slower:+.0%}"
        host = f" + {gib(each.host_bytes)} host" if each.host_bytes else ""
        table.add_row(
            describe_layout(each.layout),
            describe_levers(each.levers),
            gib(each.gpu_bytes) + host,
            _seconds(each.step_s),
            against,
        )
    return table


def _simulation(plan: Plan, found: Mapping[str, Any]) -> str:
    simulated = Ledger.from_json(found["ledger"], "the simulation")
    allocated = simulated.peak_allocated_bytes()
    formula = plan.ledger.peak_allocated_bytes()
    verdict = "[green]fits[/green]" if found["fits"] else "[red]does not fit[/red]"
    return (
        f"simulated: {verdict}, {gib(allocated)} allocated ({formula / allocated - 1:+.1%} in the formulas), "
        f"{gib(simulated.peak_reserved_bytes())} reserved, {gib(found['gpu_peak_bytes'])} with the CUDA context"
    )


def _estimators(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="The same question to others", title_justify="left", box=None, padding=(0, 1))
    for column in ("estimator", "GPU", "host", "counts"):
        table.add_column(column)
    for row in rows:
        sizes = [gib(row[place]) if row[place] is not None else "–" for place in ("gpu_bytes", "host_bytes")]
        table.add_row(row["who"], *sizes, row["note"])
    return table


def _seconds(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.{0 if seconds >= 0.01 else 1}f} ms"


def print_serving(serving: Serving, *, as_json: bool) -> None:
    """Print whether the model fits a card for serving, and its predicted and highest possible speed."""
    if as_json:
        return print_json(serving.to_json())
    console = output_console()
    room = serving.machine.accelerator.memory_bytes
    verdict = "[green]fits[/green]" if serving.fits else "[red]does not fit[/red]"
    console.print(
        f"[bold]serving {escape(serving.model)} ({escape(serving.weights_name)}) on {serving.machine.text}: "
        f"{verdict}[/bold], {gib(serving.gpu_peak_bytes)} of {gib(room)}"
    )
    console.print(_memory(serving.ledger, room, console.width))
    if serving.fits:
        console.print(_speeds(serving))
    for change in () if serving.fits else serving.changes():
        console.print(f"  would fit with {change}")
    for sentence in serving.notes():
        console.print(f"[dim]· {sentence}[/dim]", soft_wrap=True)


def _speeds(serving: Serving) -> Table:
    """What is predicted of an engine and, beside it, what the card sets as a limit."""
    speed, most = serving.predicted_tokens_per_second, serving.tokens_per_second
    first, least = serving.predicted_first_token_seconds, serving.first_token_seconds
    limit = "memory's bandwidth" if serving.machine.is_cpu else "card's bandwidth"
    asked = f"{counted(serving.requests, 'request')} of {counted(serving.length, 'token')}"
    table = Table.grid(padding=(0, 2))
    table.add_row("[dim]decode[/dim]", f"{speed:,.0f} tokens/s for {asked}, at most {most:,.0f} by the {limit}")
    prompt = f"a prompt of {counted(serving.length, 'token')} that comes alone"
    table.add_row(
        "[dim]first token[/dim]", f"{_seconds(first)} after {prompt}, at least {_seconds(least)} for products"
    )
    table.add_row("[dim]room[/dim]", f"for {counted(serving.most_requests, 'such request')} at a time")
    return table


def print_batches(batches: list[Batch], *, as_json: bool) -> None:
    """Print every micro-batch × accumulation × ranks of a global batch, and a warning where its size is unusual."""
    first = batches[0]
    sentence = warning(first.tokens, first.ranks)
    if as_json:
        rows = [{"micro_batch": each.micro, "accumulation": each.accumulation, "ranks": each.ranks} for each in batches]
        return print_json({"rows": first.rows, "tokens": first.tokens, "splits": rows, "warning": sentence})
    console = output_console()
    for line in (*map(str, batches), *([sentence] if sentence else [])):
        console.print(line, soft_wrap=True)
