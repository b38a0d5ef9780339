"""`tightfit compress`: make a model smaller, layer by layer."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tightfit.cli.options import Device, ModelSource

if TYPE_CHECKING:
    from tightfit.compress.report import CompressionReport
    from tightfit.compress.structured import KeptShape
    from tightfit.report.compression import CompressionProgress


def compress(
    model: ModelSource,
    out: Annotated[Path, typer.Option("--out", help="Directory to write; must not exist yet.")],
    method: Annotated[
        str,
        typer.Option(
            help="rtn, gptq, awq, smoothquant, spqr, nf4, llm.int8, fp8, mxfp4, nvfp4, binary; with rotate+ before. "
            "Pruning: magnitude, wanda, sparsegpt; alone, or before others, as in wanda+gptq. "
            "structured: cut layers, heads, MLP channels or experts. svd, whitened-svd: two layers of low rank for one."
        ),
    ] = "gptq",
    bits: Annotated[int | None, typer.Option(help="Bits a weight: 2 to 8; 4 by default, 3 for spqr.")] = None,
    group: Annotated[
        int | None, typer.Option(help="Inputs that share a scale; 0 for one scale a row. 128 by default.")
    ] = None,
    symmetric: Annotated[
        bool | None, typer.Option("--symmetric/--asymmetric", help="Without zero points; the default at 8 bits.")
    ] = None,
    activations: Annotated[
        Literal["int8", "fp8"] | None, typer.Option(help="Round inputs of layers too, beside 8-bit weights.")
    ] = None,
    static: Annotated[
        Literal["minmax", "percentile", "kl", "mse"] | None,
        typer.Option(help="Round inputs by one scale a layer, found in calibration so; else one a token as they come."),
    ] = None,
    sparsity: Annotated[float | None, typer.Option(help="Share of weights that pruning makes zero; 0.5.")] = None,
    pattern: Annotated[str | None, typer.Option(help="As 2:4, by which of every 4 neighbouring inputs 2 stay.")] = None,
    keep_layers: Annotated[int | None, typer.Option(min=1, help="Layers that stay (structured).")] = None,
    keep_heads: Annotated[int | None, typer.Option(min=1, help="Attention heads that stay (structured).")] = None,
    keep_mlp: Annotated[int | None, typer.Option(min=1, help="MLP channels that stay (structured).")] = None,
    keep_experts: Annotated[int | None, typer.Option(min=1, help="Experts that stay (structured).")] = None,
    keep: Annotated[float | None, typer.Option(help="Share of the matrices' numbers that stays (svd); 0.7.")] = None,
    fit: Annotated[
        str | None, typer.Option(metavar="CARD", help="Choose bits layer by layer so that it serves on this card.")
    ] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of a request beside the weights (--fit).")] = None,
    recipe: Annotated[Path | None, typer.Option(help="A YAML file of steps, instead of --method.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", help="Text like what the model will read; else its own. Repeatable."),
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
    """Quantize or prune a model layer by layer, with one layer in memory at a time.

    Killed, it goes on where it was when the same command is given again. What comes out is a model everywhere:
    tightfit sample, evaluate --against and export take it, and transformers loads it.

    \b
    tightfit compress my-model --method gptq --bits 4 --out my-model-4bit
    tightfit compress my-model --method gptq --bits 4 --group 128 --data wiki.txt --out my-model-4bit
    tightfit compress my-model --method smoothquant --static mse --data wiki.txt --out my-model-w8a8
    tightfit compress my-model --recipe steps.yaml --data wiki.txt --out small
    tightfit compress my-model --method sparsegpt --pattern 2:4 --data wiki.txt --out sparse
    tightfit compress my-model --fit T4 --context 4096 --data wiki.txt --out fits-a-T4
    tightfit compress my-model --method structured --keep-layers 24 --keep-mlp 1024 --data wiki.txt --out narrow
    tightfit evaluate my-model-4bit --data test.txt --against my-model
    """
    from tightfit.compress.structured import KeptShape
    from tightfit.errors import UserError
    from tightfit.report.compression import CompressionProgress, print_compression
    from tightfit.train.precision import choose_device

    options = {"bits": bits, "group": group, "symmetric": symmetric, "sparsity": sparsity, "pattern": pattern}
    options |= {"activations": activations, "static": static}
    kept = KeptShape(layers=keep_layers, heads=keep_heads, mlp=keep_mlp, experts=keep_experts)
    if kept != KeptShape() and method != "structured":
        raise UserError("--keep-layers, -heads, -mlp and -experts belong to --method structured")
    if recipe is not None and any(option is not None for option in options.values()):
        raise UserError(f"--{', --'.join(options)} belong to --method; a recipe says them in its steps")
    if method in ("structured", "svd", "whitened-svd") and any(option is not None for option in options.values()):
        raise UserError(f"--{', --'.join(options)} belong to other methods than {method}; say --keep…")
    if keep is not None and method not in ("svd", "whitened-svd"):
        raise UserError(f"--keep belongs to --method svd and whitened-svd, not to {method}")
    if fit is not None and (recipe is not None or any(option is not None for option in options.values())):
        raise UserError(f"--fit chooses bits itself; drop --recipe and --{', --'.join(options)}")
    if context is not None and fit is None:
        raise UserError("--context says what --fit makes room for; name a card with --fit")
    common: dict[str, Any] = {
        "model": model,
        "out": out,
        "data": tuple(data or ()),
        "field": field,
        "samples": samples,
        "length": sequence_length,
        "device": str(choose_device(device)),
        "cache": cache,
        "progress": not as_json,
    }
    with CompressionProgress(quiet=as_json) as progress:
        if recipe is None and method == "structured":
            report = _narrowed(kept, form, common, progress)
        elif recipe is None and method in ("svd", "whitened-svd"):
            report = _factored(method, keep, form, common, progress)
        elif fit is not None:
            report = _fitted(fit, context, method, form, common, progress)
        else:
            report = _compressed(method, recipe, options, form, common, progress)
    print_compression(report, as_json=as_json)


def _narrowed(
    kept: "KeptShape", form: str | None, common: dict[str, Any], progress: "CompressionProgress"
) -> "CompressionReport":
    from tightfit.compress.narrowing import NarrowingJob, narrow
    from tightfit.errors import UserError

    if form is not None:
        raise UserError(f"--format is {form}, a layout of codes, but structured pruning quantizes nothing; drop it")
    return narrow(NarrowingJob(kept=kept, **common), progress.announce, progress.layer)


def _factored(
    method: str, keep: float | None, form: str | None, common: dict[str, Any], progress: "CompressionProgress"
) -> "CompressionReport":
    from tightfit.compress.factoring import FactoringJob, factorise
    from tightfit.errors import UserError

    if form is not None:
        raise UserError(f"--format is {form}, a layout of codes, but {method} quantizes nothing; drop it")
    fields = common | ({} if keep is None else {"keep": keep})
    job = FactoringJob(method="svd" if method == "svd" else "whitened", **fields)
    return factorise(job, progress.announce, progress.layer)


def _compressed(
    method: str,
    recipe: Path | None,
    options: dict[str, Any],
    form: str | None,
    common: dict[str, Any],
    progress: "CompressionProgress",
) -> "CompressionReport":
    from tightfit.compress.compression import CompressionJob, compress
    from tightfit.compress.recipe import read_recipe, recipe_of

    steps = recipe_of(method, **options) if recipe is None else read_recipe(recipe)
    job = CompressionJob(recipe=steps, format=form, **common)
    return compress(job, progress.announce, progress.layer)


def _fitted(
    card: str,
    context: int | None,
    method: str,
    form: str | None,
    common: dict[str, Any],
    progress: "CompressionProgress",
) -> "CompressionReport":
    from dataclasses import replace

    from tightfit.compress.compression import CompressionJob, compress
    from tightfit.compress.fitting import fit_bits
    from tightfit.compress.recipe import Recipe
    from tightfit.hardware.machine import parse_machine

    machine = parse_machine(card)
    job = CompressionJob(recipe=Recipe(()), format=form, **common)
    found = fit_bits(job, machine, context, method, progress.say)
    progress.say(found.describe(machine))
    return compress(replace(job, recipe=found.recipe), progress.announce, progress.layer)
