"""`tightfit models`: the presets and their sizes."""

from typing import Annotated

import typer

from tightfit.cli.options import AsJson


def models(
    name: Annotated[
        str | None, typer.Argument(help="A preset, run, directory, config.json or GGUF file; all presets by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the model presets with their sizes, or show the shape of one model.

    \b
    tightfit models
    tightfit models llama-3.1-8b
    """
    from tightfit.models.presets import preset_names
    from tightfit.models.resolve import resolve_spec
    from tightfit.report.tables import print_model, print_models

    if name is None:
        print_models({preset: resolve_spec(preset) for preset in preset_names()}, as_json=as_json)
    else:
        from tightfit.cli.plan import known_model

        spec, _ = known_model(name)
        print_model(name, spec, as_json=as_json)
