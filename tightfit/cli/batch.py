"""`tightfit batch`: a global batch in tokens, rows, micro-batches and accumulation."""

from typing import Annotated

from tightfit.cli.options import AsJson, count_option


def batch(
    seq: Annotated[int, count_option(text="Tokens per row.")],
    ranks: Annotated[int, count_option(text="Data ranks.")] = 1,
    rows: Annotated[int | None, count_option(text="Rows per optimizer step; give this or --tokens.")] = None,
    tokens: Annotated[int | None, count_option(text="Tokens per optimizer step: 4M.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the ways to split a global batch: micro-batch × accumulation × data ranks.

    \b
    tightfit batch --tokens 61.44M --seq 32000 --ranks 120
    """
    from tightfit.errors import UserError
    from tightfit.plan.batch import rows_of_tokens, splits
    from tightfit.report.plan import print_batches

    if rows is not None and tokens is not None:
        raise UserError(f"the batch is given as {rows:,} rows and as {tokens:,} tokens; give one of the two")
    if tokens is not None:
        rows = rows_of_tokens(tokens, seq, ranks)
    if rows is None:
        raise UserError("neither --rows nor --tokens is given; say how large the batch is with one of the two")
    print_batches(splits(rows, seq, ranks), as_json=as_json)
