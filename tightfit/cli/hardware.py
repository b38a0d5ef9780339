"""`tightfit hardware`: the accelerators the planner knows."""

from typing import Annotated

import typer

from tightfit.cli.options import AsJson


def hardware(
    name: Annotated[str | None, typer.Argument(help="A card, such as RTX3060; all of them by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the accelerators that `tightfit plan --on` knows with their figures, or show one and where these come from.

    \b
    tightfit hardware
    tightfit hardware RTX3060
    tightfit hardware A100-80GB:pcie
    """
    from tightfit.hardware.catalog import find_accelerator
    from tightfit.report.catalog import print_card, print_catalog

    if name is None:
        print_catalog(as_json=as_json)
    else:
        family, _, form = name.partition(":")
        print_card(find_accelerator(family, form or None), as_json=as_json)
