"""Options that several verbs share."""

from typing import Annotated, Literal

import typer

ModelSource = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run or checkpoint, a Hugging Face directory, a GGUF file, or smollm2-135m-instruct.",
    ),
]
Precision = Annotated[
    Literal["auto", "fp32", "bf16", "fp16"],
    typer.Option(help="What to compute in; auto is float32 on a CPU and on a GPU what the weights are stored in."),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to run.")]
Verify = Annotated[
    bool, typer.Option("--verify/--no-verify", help="Compare weights with the checksums that came with them.")
]
Override = Annotated[
    list[str] | None,
    typer.Option("-o", "--override", help="Change a field: -o layout.micro_batch=1. May be repeated."),
]
