"""`tightfit export`: weights for other programs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tightfit.cli.options import ModelSource, Verify


def export(
    model: ModelSource,
    target: Annotated[Path, typer.Argument(help="Directory (hf) or file (gguf) to write; must not exist yet.")],
    form: Annotated[
        Literal["hf", "gguf"], typer.Option("--format", help="A Hugging Face directory, or a GGUF file for llama.cpp.")
    ] = "hf",
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "q8_0"],
        typer.Option(help="Number format of the weights; q8_0 is for gguf only."),
    ] = "bf16",
    verify: Verify = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a model in a format that other programs load, without optimizer states.

    \b
    tightfit export runs/stdlib my-model                    transformers, vLLM, …
    tightfit export runs/stdlib my.gguf --format gguf       llama.cpp
    """
    from tightfit.models.saving import export_model
    from tightfit.report.tables import print_export

    print_export(export_model(model, target, form=form, dtype=dtype, verified=verify), as_json=as_json)
