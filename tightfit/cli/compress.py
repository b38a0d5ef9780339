"""`tightfit compress`: make a model smaller, layer by layer."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tightfit.cli.options import Device, ModelSource


def compress(
    model: ModelSource,
    out: Annotated[Path, typer.Option("--out", help="Directory to write; must not exist yet.")],
    method: Annotated[
        str,
        typer.Option(
            help="rtn, gptq, awq, smoothquant, spqr, nf4, llm.int8, fp8, mxfp4, nvfp4, binary; with rotate+ before."
        ),
    ] = "gptq",
    bits: Annotated[int | None, typer.Option(help="Bits a weight: 2 to 8; 4 by default, 3 for spqr.")] = None,
    group: Annotated[
        int | None, typer.Option(help="Inputs that share a scale; 0 for one scale a row. 128 by default.")
    ] = None,
    symmetric: Annotated[
        bool | None, typer.Option("--symmetric/--asymmetric", help="Without zero points; the default at 8 bits.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="A YAML file of steps, instead of --method.")] = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", "-d", help="Text to calibrate with; may be repeated.")
    ] = None,
    field: Annotated[str, typer.Option(help="Column or key that holds the text.")] = "text",
    samples: Annotated[int, typer.Option(min=1, help="Calibration rows.")] = 128,
    sequence_length: Annotated[
        int | None, typer.Option("--seq", min=2, help="Tokens a row; at most 2048 by default.")
    ] = None,
    form: Annotated[
        Literal["compressed-tensors", "gptq", "awq", "bitsandbytes", "tightfit"] | None,
        typer.Option("--format", help="File layout; by default the one most programs load."),
    ] = None,
    cache: Annotated[Path, typer.Option(help="Where tokenized text is kept.")] = Path("~/.cache/tightfit"),
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Quantize a model layer by layer, with one layer in memory at a time.

    Killed, it goes on where it was when the same command is given again. What comes out is a model everywhere:
    tightfit sample, evaluate --against and export take it, and transformers loads it.

    \b
    tightfit compress my-model --method gptq --bits 4 --group 128 --data wiki.txt --out my-model-4bit
    tightfit compress my-model --recipe steps.yaml --data wiki.txt --out small
    tightfit evaluate my-model-4bit --data test.txt --against my-model
    """
    from tightfit.compress.compression import CompressionJob
    from tightfit.compress.compression import compress as run
    from tightfit.compress.recipe import read_recipe, recipe_of
    from tightfit.errors import UserError
    from tightfit.report.compression import CompressionProgress, print_compression
    from tightfit.train.precision import choose_device

    if recipe is not None and any(option is not None for option in (bits, group, symmetric)):
        raise UserError("--bits, --group and --symmetric belong to --method; a recipe says them in its steps")
    steps = recipe_of(method, bits=bits, group=group, symmetric=symmetric) if recipe is None else read_recipe(recipe)
    job = CompressionJob(
        model=model, out=out, recipe=steps, data=tuple(data or ()), field=field, samples=samples,
        length=sequence_length, format=form, device=str(choose_device(device)), cache=cache, progress=not as_json,
    )  # fmt: skip
    with CompressionProgress(quiet=as_json) as progress:
        report = run(job, progress.announce, progress.layer)
    print_compression(report, as_json=as_json)
