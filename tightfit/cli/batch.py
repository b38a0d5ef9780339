"""`tightfit batch`: a global batch in tokens, rows, micro-batches and accumulation."""

from typing import Annotated

import typer

from tightfit.cli.options import AsJson


def batch(
    seq: Annotated[int, typer.Option(min=1, help="Tokens per row.")],
    ranks: Annotated[int, typer.Option(min=1, help="Data ranks.")] = 1,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows per optimizer step; give this or --tokens.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens per optimizer step: 4M.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the ways to split a global batch: micro-batch × accumulation × data ranks.

    \b
    tightfit batch --tokens 61.44M --seq 32000 --ranks 120
    """
    from tightfit.errors import UserError
    from tightfit.hardware.sizes import parse_count
    from tightfit.plan.batch import rows_of_tokens, splits
    from tightfit.report.plan import print_batches

    if rows is None and tokens is None:
        raise UserError("neither --rows nor --tokens is given; say how large the batch is with one of the two")
    if rows is not None and tokens is not None:
        raise UserError(f"the batch is given as {rows} rows and as {tokens} tokens; give one of the two")
    if rows is None:
        count = parse_count(tokens or "", "--tokens")
        if count < 1:
            raise UserError(f"--tokens is {tokens}; give at least 1")
        rows = rows_of_tokens(count, seq, ranks)
    print_batches(splits(rows, seq, ranks), as_json=as_json)
