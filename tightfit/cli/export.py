"""`tightfit export`: weights for other programs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tightfit.cli.options import AsJson, ModelSource, Verify
from tightfit.cli.outputs import WEIGHT_FILES

WHOLE = ("fp32", "bf16", "fp16", "q8_0")
"""Number formats that are written weight by weight, without calibration text."""


def export(
    model: ModelSource,
    target: Annotated[Path, typer.Argument(help="Directory (hf) or file (gguf) to write; must not exist yet.")],
    form: Annotated[
        Literal["hf", "gguf", "gptq", "awq", "compressed-tensors", "bitsandbytes", "peft"] | None,
        typer.Option(
            "--format",
            help="A Hugging Face directory, a GGUF file (the default for a name that ends in .gguf), "
            "another layout of a compressed model, or of a run of adapters these alone (peft).",
        ),
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "q8_0", "q4_0", "q4_1", "q4_k_m", "q5_k_m", "q6_k"] | None,
        typer.Option(help="Number format of the weights, bf16 by default; those that begin with q are for gguf only."),
    ] = None,
    verify: Verify = True,
    data: Annotated[
        list[str] | None, typer.Option("--data", "-d", help="Text that says which weights of a small GGUF matter most.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a model in a format that other programs load, without optimizer states.

    \b
    tightfit export runs/stdlib my-model                     transformers, vLLM, …
    tightfit export runs/stdlib my.gguf                      llama.cpp
    tightfit export runs/tuned merged                       a model with its adapters multiplied out and added
    tightfit export runs/tuned poet --format peft           the adapters alone, for PEFT and `tightfit serve --adapter`
    tightfit export small other --format gptq               a compressed model's codes as GPTQ's kernels want them
    """
    form = form or ("gguf" if target.suffix.lower() == ".gguf" else "hf")
    refuse_export_options(target, form, dtype, data or [], verify=verify)
    if form == "peft":
        from tightfit.models.saving import export_adapter
        from tightfit.report.tables import print_export

        return print_export(export_adapter(model, target, verified=verify), as_json=as_json)
    if form not in ("hf", "gguf"):
        from tightfit.compress.conversion import convert
        from tightfit.report.tables import print_export

        return print_export(convert(model, target, form), as_json=as_json)
    dtype = dtype or "bf16"
    if dtype not in ("fp32", "bf16", "fp16", "q8_0"):
        return _export_small(model, target, form, dtype, tuple(data or ()), as_json)
    from tightfit.models.saving import export_model
    from tightfit.report.tables import print_export

    print_export(export_model(model, target, form=form, dtype=dtype, verified=verify), as_json=as_json)


def refuse_export_options(target: Path, form: str, dtype: str | None, data: list[str], *, verify: bool) -> None:
    """Refuse options that would be ignored."""
    from tightfit.errors import UserError

    if form != "gguf" and target.suffix.lower() == ".gguf":
        raise UserError(f"{target} is named as a GGUF file, but --format is {form}; leave --format out, or .gguf")
    if form != "gguf" and target.suffix.lower() in WEIGHT_FILES:
        raise UserError(f"{target} is named as a file of weights, but {form} is a directory; name one, or a .gguf file")
    if form == "peft" and dtype is not None:
        raise UserError(f"--dtype is {dtype}, but adapters are written as they were trained; leave it out")
    if form not in ("hf", "gguf", "peft") and (dtype is not None or not verify):
        raise UserError(f"--dtype and --no-verify are for hf and gguf; {form} keeps the codes as they are")
    if data and (dtype or "bf16") in WHOLE:
        raise UserError(f"--data is for small GGUF formats, and --dtype is {dtype or 'bf16'}; leave it out")
    if not verify and (dtype or "bf16") not in WHOLE:
        raise UserError(f"--no-verify does not go with --dtype {dtype}, for which weights are always compared")


def _export_small(
    model: str,
    target: Path,
    form: str,
    dtype: str,
    data: tuple[str, ...],
    as_json: bool,
) -> None:
    import torch

    from tightfit.compress.gguf.gguf_export import export_gguf
    from tightfit.errors import UserError
    from tightfit.report.tables import print_export

    if form != "gguf":
        raise UserError(f"dtype {dtype} is a GGUF format; add --format gguf or choose fp32, bf16 or fp16")
    exported = export_gguf(
        model,
        target,
        dtype,
        data,
        samples=32,
        length=None,
        cache=Path("~/.cache/tightfit"),
        device=torch.device("cpu"),
        progress=not as_json,
    )
    print_export(exported, as_json=as_json)
