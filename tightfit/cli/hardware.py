"""`tightfit hardware`: the accelerators the planner knows."""

from typing import Annotated

import typer


def hardware(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """List the accelerators that `tightfit plan --on` knows, with their figures and where these come from."""
    from tightfit.report.plan import print_catalog

    print_catalog(as_json=as_json)
