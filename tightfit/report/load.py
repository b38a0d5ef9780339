"""Latency and throughput of a served model under load, measured and predicted: a table, or one JSON object."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from tightfit.report.tables import print_json

if TYPE_CHECKING:
    from tightfit.plan.serving.seconds import ServingRates
    from tightfit.serve.load import LoadRow
    from tightfit.serve.peer_load import PeerRow

WIDTHS = (7, 24, 24, 16, 10)
"""Of the columns, where their numbers are not wider."""


def print_load(
    model: str,
    rows: "Sequence[LoadRow]",
    rates: "ServingRates",
    *,
    prompt_tokens: int,
    answer_tokens: int,
    as_json: bool,
    peers: "Mapping[str, Sequence[PeerRow]] | None" = None,
) -> None:
    """Print a row for each number of concurrent requests; `peers` are the times of other engines, by name."""
    if as_json:
        told = {"model": model, "rows": [asdict(row) for row in rows]}
        return print_json(told | {name: [asdict(row) for row in theirs] for name, theirs in (peers or {}).items()})
    read, products = rates.bytes_per_second / 1e9, rates.product_flop_s / 1e12
    print(f"{model}, prompts of {prompt_tokens} tokens, answers of {answer_tokens}: median and 90th percentile,")
    print(f"beside predictions (≈) from {read:,.1f} GB/s and {products:,.2f} TFLOP/s, both measured here,")
    print("and the most that reading weights, keys and values allows")
    print(_columns("at once", "first token, ms", "between tokens, ms", "tokens/s", "at most"))
    for row in rows:
        print(_line(row))
    for name, theirs in (peers or {}).items():
        print(f"{name}, greedy, the same weights and lengths, all at once")
        for peer, row in zip(theirs, rows, strict=False):
            print(_peer_line(peer, row))


def _columns(*cells: str) -> str:
    """A line of the table, whose cells stay apart however wide they are."""
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=False))


def _line(row: "LoadRow") -> str:
    first = f"{row.first_token_ms:.1f} / {row.first_token_ms_p90:.1f} ≈ {row.predicted_first_token_ms:.1f}"
    between = f"{row.between_tokens_ms:.2f} / {row.between_tokens_ms_p90:.2f} ≈ {row.predicted_between_tokens_ms:.2f}"
    speed = f"{row.tokens_per_second:,.1f} ≈ {row.predicted_tokens_per_second:,.1f}"
    return _columns(str(row.at_once), first, between, speed, f"{row.most_tokens_per_second:,.1f}")


def _peer_line(peer: "PeerRow", ours: "LoadRow") -> str:
    times = f"ours {ours.tokens_per_second / peer.tokens_per_second:.2f}×"
    first, between, speed = (
        f"{peer.first_token_ms:.1f}",
        f"{peer.between_tokens_ms:.2f}",
        f"{peer.tokens_per_second:,.1f}",
    )
    return _columns(str(peer.at_once), first, between, speed, times)
