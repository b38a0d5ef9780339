"""Prints the verdict of the equivalence check."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from tightfit.counted import counted
from tightfit.report.console import output_console
from tightfit.report.tables import print_json

if TYPE_CHECKING:
    from tightfit.prove.check_target import CheckTarget
    from tightfit.prove.equivalence import Verdict


def print_verdict(verdict: "Verdict", target: "CheckTarget", *, as_json: bool) -> None:
    """One screen, or one JSON object."""
    if as_json:
        shape = {"spec": asdict(target.spec), "layout": target.layout.model_dump(), "passes": target.passes}
        shape |= {} if target.adapter.rank is None else {"adapter": target.adapter.model_dump()}
        return print_json({**verdict.to_json(), **shape, "left_out": target.left_out})
    console = output_console()
    spread = ", ".join(f"{name} {value}" for name, value in target.layout.model_dump(exclude_defaults=True).items())
    console.print(f"{counted(verdict.ranks, 'rank')} ({spread}) against one, {counted(verdict.steps, 'step')}")
    frozen = "" if target.adapter.rank is None else f", frozen, with adapters of rank {target.adapter.rank}"
    console.print(f"a {target.spec.family} of {target.spec.params():,} weights{frozen}, {verdict.compared} comparisons")
    if target.left_out:
        console.print(f"left out on both sides: {', '.join(target.left_out)}")
    if verdict.first is None:
        console.print(f"[green]the same[/]: the largest error is {verdict.largest.error:.1e}")
        return
    console.print(f"[red]different[/]: {verdict.first.sentence()}")
    console.print(f"{verdict.different} of {verdict.compared} differ; most of all, {verdict.largest.sentence()}")
