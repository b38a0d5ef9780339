"""`tightfit calibrate`: measure this machine's rates for its own plans."""

from typing import Annotated, Literal

import typer

from tightfit.cli.options import AsJson


def calibrate(
    device: Annotated[Literal["auto", "cuda", "cpu"], typer.Option(help="What to measure.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure products, attention, copies, the host link and launches on this machine, in under a minute.

    The result is kept in your configuration directory. `tightfit plan --on local` and `tightfit train --fit` then count
    with it, and `tightfit hardware` shows it.
    """
    from tightfit.hardware.calibration import read_calibrations, write_calibration
    from tightfit.prove.calibrate import calibrate as measure
    from tightfit.report.tables import print_json
    from tightfit.train.precision import choose_device

    read_calibrations()  # reports a broken file before a minute is spent
    found = measure(choose_device(device), (lambda line: None) if as_json else typer.echo)
    path = write_calibration(found)
    if as_json:
        return print_json({**found.to_json(), "file": str(path)})
    typer.echo(f"kept in {path}; `tightfit plan MODEL --on local` counts with it")
