"""Latency and throughput of a served model under load, measured and predicted: a table, or one JSON object."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from tightfit.report.tables import print_json

if TYPE_CHECKING:
    from tightfit.plan.serving.seconds import ServingRates
    from tightfit.serve.load import LoadRow
    from tightfit.serve.peer_load import PeerRow


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
    print(f"{'at once':>7}{'first token, ms':>26}{'between tokens, ms':>26}{'tokens/s':>18}{'at most':>10}")
    for row in rows:
        print(_line(row))
    for name, theirs in (peers or {}).items():
        print(f"{name}, greedy, the same weights and lengths, all at once")
        for peer, row in zip(theirs, rows, strict=False):
            print(_peer_line(peer, row))


def _line(row: "LoadRow") -> str:
    first = f"{row.first_token_ms:.1f} / {row.first_token_ms_p90:.1f} ≈ {row.predicted_first_token_ms:.1f}"
    between = f"{row.between_tokens_ms:.2f} / {row.between_tokens_ms_p90:.2f} ≈ {row.predicted_between_tokens_ms:.2f}"
    speed = f"{row.tokens_per_second:,.1f} ≈ {row.predicted_tokens_per_second:,.1f}"
    return f"{row.at_once:>7}{first:>26}{between:>26}{speed:>18}{row.most_tokens_per_second:>10,.1f}"


def _peer_line(peer: "PeerRow", ours: "LoadRow") -> str:
    times = f"ours {ours.tokens_per_second / peer.tokens_per_second:.2f}×"
    columns = f"{peer.first_token_ms:>26.1f}{peer.between_tokens_ms:>26.2f}{peer.tokens_per_second:>18,.1f}"
    return f"{peer.at_once:>7}{columns}{times:>12}"
