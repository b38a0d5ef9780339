"""`tightfit compare`: a prediction beside what happened."""

from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli.options import AsJson


def compare(
    predicted: Annotated[Path, typer.Argument(help="A plan, or any file or directory with a ledger.")],
    measured: Annotated[Path, typer.Argument(help="The directory of a measured run, or its ledger.json.")],
    as_json: AsJson = False,
) -> None:
    """Lay two ledgers side by side, with the error of every line.

    \b
    tightfit plan llama-3.2-1b --on local --seq 2048 --global-batch 8 --save plan.json
    tightfit measure plan.json -o data.train=notes -o output=runs/mine
    tightfit compare plan.json runs/mine
    """
    from tightfit.memory.comparison import compare as lay_side_by_side
    from tightfit.memory.comparison import read_ledger
    from tightfit.report.ledger import print_comparison

    expected, actual = read_ledger(predicted), read_ledger(measured)
    comparison = lay_side_by_side(expected, actual)
    print_comparison(comparison, (str(predicted), expected), (str(measured), actual), as_json=as_json)
