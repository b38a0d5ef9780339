"""The table of `tightfit bench serve`."""

import re

import pytest

from tightfit.plan.serving.seconds import StepRates
from tightfit.report.load import print_load
from tightfit.serve.load import LoadRow
from tightfit.serve.peer_load import PeerRow


def test_columns_stay_apart_however_wide(capsys: pytest.CaptureFixture[str]) -> None:
    """With thousands of requests at a time numbers ran into each other."""
    wide = LoadRow(
        at_once=5000,
        requests=5000,
        first_token_ms=12590.0,
        first_token_ms_p90=12755.2,
        between_tokens_ms=1168.43,
        between_tokens_ms_p90=1257.06,
        tokens_per_second=28757.9,
        most_tokens_per_second=68863512.7,
        predicted_first_token_ms=11211.0,
        predicted_between_tokens_ms=1401.92,
        predicted_tokens_per_second=16314.6,
    )
    peers = {"transformers": [PeerRow(at_once=5000, first_token_ms=1e6, between_tokens_ms=1e6, tokens_per_second=1.0)]}
    rates = StepRates(bytes_per_second=1e9, product_flop_s=1e12, attention_flop_s=1e12)
    print_load("m", [wide], rates, prompt_tokens=8, answer_tokens=2, as_json=False, peers=peers)
    titles, row, _, peer = capsys.readouterr().out.splitlines()[3:]
    assert re.split(r" {2,}", titles.strip()) == [
        "at once",
        "first token, ms",
        "between tokens, ms",
        "tokens/s",
        "at most",
    ]
    numbers = re.split(r" {2,}", row.strip())
    assert (len(numbers), numbers[0], numbers[3:]) == (5, "5000", ["28,757.9 ≈ 16,314.6", "68,863,512.7"])
    assert re.split(r" {2,}", peer.strip())[3:] == ["1.0", "ours 28757.90×"]
