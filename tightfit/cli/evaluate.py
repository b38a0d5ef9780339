"""`tightfit evaluate`: loss and perplexity of a model on text."""

from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli.options import Device, ModelSource, Precision, Verify


def evaluate(
    model: ModelSource,
    data: Annotated[list[str], typer.Option("--data", "-d", help="File or directory of text; may be repeated.")],
    field: Annotated[str, typer.Option(help="Column or key that holds the text.")] = "text",
    chat: Annotated[
        bool, typer.Option("--chat", help="The data are conversations; what the assistant says counts.")
    ] = False,
    sequence_length: Annotated[
        int | None,
        typer.Option("--seq", help="Tokens per row; the model's positions, at most 2048, by default."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows per forward pass.")] = 4,
    against: Annotated[
        str | None, typer.Option(help="Another model, such as the one this was compressed from, to compare with.")
    ] = None,
    cache: Annotated[Path, typer.Option(help="Where tokenized shards are kept.")] = Path("~/.cache/tightfit"),
    device: Device = "auto",
    precision: Precision = "auto",
    verify: Verify = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a model's loss and perplexity on text.

    Documents are packed into rows without attention across their borders; all tokens but the first of each count.

    \b
    tightfit evaluate runs/stdlib --data notes.txt
    tightfit evaluate smollm2-135m-instruct --data README.md --seq 512 --json
    tightfit evaluate runs/mine --chat --data conversations.jsonl
    tightfit evaluate small --data README.md --against smollm2-135m-instruct
    """
    if against is not None:
        refuse_with_against(chat=chat, precision=precision != "auto", no_verify=not verify)
        from tightfit.compress.comparison import compare_sources
        from tightfit.report.compression import print_comparison
        from tightfit.train.precision import choose_device

        comparison = compare_sources(
            model,
            against,
            data,
            field=field,
            sequence_length=sequence_length,
            batch=batch,
            cache=cache,
            device=choose_device(device),
            progress=not as_json,
        )
        return print_comparison(comparison, as_json=as_json)
    from tightfit.report.tables import print_evaluation
    from tightfit.train.evaluation import evaluate_source

    result = evaluate_source(
        model,
        data,
        field=field,
        chat=chat,
        sequence_length=sequence_length,
        batch=batch,
        cache=cache,
        device=device,
        precision=precision,
        verified=verify,
        progress=not as_json,
    )
    print_evaluation(result, as_json=as_json)


def refuse_with_against(**given: bool) -> None:
    """A sentence for the first option that a comparison of two models does not take."""
    from tightfit.errors import UserError

    for name, is_given in given.items():
        if is_given:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} does not go with --against, which compares on text, in float32; leave one out")
