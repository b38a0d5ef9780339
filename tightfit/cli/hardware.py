"""`tightfit hardware`: the accelerators the planner knows."""

from tightfit.cli.options import AsJson


def hardware(as_json: AsJson = False) -> None:
    """List the accelerators that `tightfit plan --on` knows, with their figures and where these come from."""
    from tightfit.report.plan import print_catalog

    print_catalog(as_json=as_json)
