"""`tightfit compress`: make a model smaller, layer by layer."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tightfit.cli.options import AsJson, Device, ModelSource, TextField, count_option, refuse_given, takes_options
from tightfit.cli.outputs import WEIGHT_FILES

if TYPE_CHECKING:
    from tightfit.compress.report import CompressionReport
    from tightfit.compress.structure.structured import KeptShape
    from tightfit.report.compression import CompressionProgress

FACTORISATIONS = ("svd", "whitened-svd")


@dataclass(frozen=True, kw_only=True)
class CompressOptions:
    """The arguments and options of `tightfit compress`."""

    model: ModelSource
    out: Annotated[Path, typer.Option("--out", help="Directory to write; must not exist yet.")]
    method: Annotated[
        str,
        typer.Option(
            help="rtn, gptq, round, awq, smoothquant, spqr, nf4, llm.int8, fp8, mxfp4, nvfp4, binary; with "
            "rotate+ before. Pruning: magnitude, wanda, sparsegpt; alone, or before others, as in wanda+gptq. "
            "structured: cut layers, heads, MLP channels or experts. svd, whitened-svd: two layers of low rank for one."
        ),
    ] = "gptq"
    bits: Annotated[int | None, typer.Option(help="Bits a weight: 2 to 8; 4 by default, 3 for spqr.")] = None
    group: Annotated[
        int | None,
        typer.Option(help="Inputs that share a scale; 0 for one scale a row, -1 for one a matrix. 128 by default."),
    ] = None
    symmetric: Annotated[
        bool | None, typer.Option("--symmetric/--asymmetric", help="Without zero points; the default at 8 bits.")
    ] = None
    activations: Annotated[
        Literal["int8", "fp8"] | None, typer.Option(help="Round inputs of layers too, beside 8-bit weights.")
    ] = None
    static: Annotated[
        Literal["minmax", "percentile", "kl", "mse"] | None,
        typer.Option(help="Round inputs by one scale a layer, found in calibration so; else one a token as they come."),
    ] = None
    head: Annotated[
        int | None,
        typer.Option(help="Bits of the output projection: 2, 4 or 8; without, it stays plain."),
    ] = None
    sparsity: Annotated[float | None, typer.Option(help="Share of weights that pruning makes zero; 0.5.")] = None
    pattern: Annotated[str | None, typer.Option(help="As 2:4, by which of every 4 neighbouring inputs 2 stay.")] = None
    keep_layers: Annotated[int | None, typer.Option(min=1, help="Layers that stay (structured).")] = None
    keep_heads: Annotated[int | None, typer.Option(min=1, help="Attention heads that stay (structured).")] = None
    keep_mlp: Annotated[int | None, typer.Option(min=1, help="MLP channels that stay (structured).")] = None
    keep_experts: Annotated[int | None, typer.Option(min=1, help="Experts that stay (structured).")] = None
    keep: Annotated[float | None, typer.Option(help="Share of the matrices' numbers that stays (svd); 0.7.")] = None
    fit: Annotated[
        str | None,
        typer.Option(metavar="CARD", help="Choose bits by layer for this card, one layer in float32 at a time."),
    ] = None
    context: Annotated[int | None, count_option(text="Tokens of a request beside the weights (--fit).")] = None
    recipe: Annotated[Path | None, typer.Option(help="A YAML file of steps, instead of --method.")] = None
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", help="Text like what the model will read; else its own. Repeatable."),
    ] = None
    field: TextField = "text"
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Calibration rows: 128 of --data by default; of its own text 32, the most."),
    ] = None
    sequence_length: Annotated[
        int | None, count_option("--seq", text="Tokens a row; at most 2048 by default.", least=2)
    ] = None
    form: Annotated[
        Literal["compressed-tensors", "gptq", "awq", "bitsandbytes", "tightfit"] | None,
        typer.Option("--format", help="File layout; by default the one most programs load."),
    ] = None
    cache: Annotated[Path, typer.Option(help="Where tokenized text is kept.")] = Path("~/.cache/tightfit")
    device: Device = "auto"
    as_json: AsJson = False

    @property
    def method_options(self) -> dict[str, Any]:
        """The options of quantizing and pruning weights, which a recipe gives in its steps."""
        names = ("bits", "group", "symmetric", "head", "sparsity", "pattern", "activations", "static")
        return {name: getattr(self, name) for name in names}

    @property
    def kept(self) -> "KeptShape":
        """The sizes that structured pruning keeps."""
        from tightfit.compress.structure.structured import KeptShape

        return KeptShape(layers=self.keep_layers, heads=self.keep_heads, mlp=self.keep_mlp, experts=self.keep_experts)


@takes_options
def compress(options: CompressOptions) -> None:
    """Quantize or prune a model layer by layer, with one layer in memory at a time.

    Without --data the model writes its own text first, and is in memory as a whole for that.

    Killed, it goes on where it was when the same command is given again. What comes out is a model everywhere:
    tightfit sample, evaluate --against and export take it, and transformers loads it.

    \b
    tightfit compress my-model --method gptq --bits 4 --out my-model-4bit
    tightfit compress my-model --method gptq --bits 4 --group 128 --data wiki.txt --out my-model-4bit
    tightfit compress my-model --method gptq --bits 4 --head 8 --data wiki.txt --out my-model-4bit-head8
    tightfit compress my-model --method smoothquant --static mse --data wiki.txt --out my-model-w8a8
    tightfit compress my-model --recipe steps.yaml --data wiki.txt --out small
    tightfit compress my-model --method sparsegpt --pattern 2:4 --data wiki.txt --out sparse
    tightfit compress my-model --fit T4 --context 4096 --data wiki.txt --out fits-a-T4
    tightfit compress my-model --method structured --keep-layers 24 --keep-mlp 1024 --data wiki.txt --out narrow
    tightfit evaluate my-model-4bit --data test.txt --against my-model
    """
    from tightfit.report.compression import CompressionProgress, print_compression

    _refuse_mixed(options)
    source = _source(options)
    with CompressionProgress(quiet=options.as_json) as progress:
        if options.recipe is None and options.method == "structured":
            report = _narrowed(options, source, progress)
        elif options.recipe is None and options.method in FACTORISATIONS:
            report = _factored(options, source, progress)
        elif options.fit is not None:
            report = _fitted(options.fit, options, source, progress)
        else:
            report = _compressed(options, source, progress)
    print_compression(report, as_json=options.as_json)


def _refuse_mixed(options: CompressOptions) -> None:
    """Refuse options that belong to another method than the chosen one, and an output that would be a file."""
    from tightfit.compress.structure.structured import KeptShape
    from tightfit.errors import UserError

    method, names = options.method, f"--{', --'.join(options.method_options)}"
    has_method_options = any(value is not None for value in options.method_options.values())
    if options.out.suffix.lower() in (".gguf", *WEIGHT_FILES):
        raise UserError(
            f"--out is {options.out}, named as a file of weights, but a directory is written; name one (for llama.cpp: "
            "tightfit export MODEL small.gguf --dtype q4_k_m)"
        )
    if options.kept != KeptShape() and method != "structured":
        raise UserError("--keep-layers, -heads, -mlp and -experts belong to --method structured")
    if options.recipe is not None:
        refuse_given(options, ("method",), "but a recipe has methods in its steps; leave it or --recipe out")
    if options.recipe is not None and has_method_options:
        raise UserError(f"{names} belong to --method; a recipe says them in its steps")
    if method in ("structured", *FACTORISATIONS) and has_method_options:
        raise UserError(f"{names} belong to other methods than {method}; say --keep…")
    if options.keep is not None and method not in FACTORISATIONS:
        raise UserError(f"--keep belongs to --method svd and whitened-svd, not to {method}")
    if options.fit is not None and (options.recipe is not None or has_method_options):
        raise UserError(f"--fit chooses bits itself; drop --recipe and {names}")
    if options.fit is not None and method in ("structured", *FACTORISATIONS):
        raise UserError(f"--fit chooses bits, but {method} quantizes nothing; leave one of them out")
    if not options.data:
        refuse_given(options, ("field",), "which is about --data; add that or leave it out")
    if options.context is not None and options.fit is None:
        raise UserError("--context says what --fit makes room for; name a card with --fit")


def _source(options: CompressOptions) -> dict[str, Any]:
    """The fields that jobs of every method have: the model, the output, and the calibration text."""
    from tightfit.train.precision import choose_device

    return {
        "model": options.model,
        "out": options.out,
        "data": tuple(options.data or ()),
        "field": options.field,
        "samples": options.samples,
        "length": options.sequence_length,
        "device": str(choose_device(options.device)),
        "cache": options.cache,
        "progress": not options.as_json,
    }


def _narrowed(options: CompressOptions, source: dict[str, Any], progress: "CompressionProgress") -> "CompressionReport":
    from tightfit.compress.structure.narrowing import NarrowingJob, narrow
    from tightfit.errors import UserError
    from tightfit.report.compression_report import write_report

    if options.form is not None:
        form = options.form
        raise UserError(f"--format is {form}, a layout of codes, but structured pruning quantizes nothing; drop it")
    return narrow(NarrowingJob(kept=options.kept, **source), progress.announce, progress.layer, write_report)


def _factored(options: CompressOptions, source: dict[str, Any], progress: "CompressionProgress") -> "CompressionReport":
    from tightfit.compress.structure.factoring import FactoringJob, factorise
    from tightfit.errors import UserError
    from tightfit.report.compression_report import write_report

    method, form = options.method, options.form
    if form is not None:
        raise UserError(f"--format is {form}, a layout of codes, but {method} quantizes nothing; drop it")
    fields = source | ({} if options.keep is None else {"keep": options.keep})
    job = FactoringJob(method="svd" if method == "svd" else "whitened", **fields)
    return factorise(job, progress.announce, progress.layer, write_report)


def _compressed(
    options: CompressOptions, source: dict[str, Any], progress: "CompressionProgress"
) -> "CompressionReport":
    from tightfit.compress.compression import CompressionJob, compress
    from tightfit.compress.recipe import read_recipe, recipe_of
    from tightfit.report.compression_report import write_report

    if options.recipe is None:
        recipe = recipe_of(options.method, **options.method_options)
    else:
        recipe = read_recipe(options.recipe)
    if not (options.data or recipe.is_calibrated):
        told = f"but {recipe.describe()} looks at no text; leave it out, or give --data to have errors measured"
        refuse_given(options, ("samples", "sequence_length"), told)
    job = CompressionJob(recipe=recipe, format=options.form, **source)
    return compress(job, progress.announce, progress.layer, write_report)


def _fitted(
    card: str, options: CompressOptions, source: dict[str, Any], progress: "CompressionProgress"
) -> "CompressionReport":
    from tightfit.compress.compression import CompressionJob, compress
    from tightfit.compress.fit.fitting import fit_bits
    from tightfit.compress.recipe import Recipe
    from tightfit.hardware.machine import parse_machine
    from tightfit.report.compression_report import write_report

    machine = parse_machine(card)
    job = CompressionJob(recipe=Recipe(()), format=options.form, **source)
    found = fit_bits(job, machine, options.context, options.method, progress.say)
    progress.say(found.describe(machine))
    job = replace(job, recipe=found.recipe, expected_kl=found.choice.loss, measuring=found.measuring)
    return compress(job, progress.announce, progress.layer, write_report)
