"""The server under load for seconds: the benchmark that does it for minutes loses and mixes up nothing, and looks."""

import asyncio
from pathlib import Path

import pytest

from benchmarks import serve_load
from tests.serve.running import Running


def test_a_loaded_server_loses_and_mixes_up_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_load, "PROMPTS", 12)
    row = serve_load.measure(str(directory), streams=12, seconds=1, batch_invariant=True)
    assert (row["failed"], row["failures"]) == (0, "")
    assert row["right"] >= 10, "of twelve clients two begin with something else"
    assert row["hung_up"] >= 1
    assert row["refused"] >= 1
    assert (row["blocks_left"], row["exit_status"]) == (0, 0)
    assert row["resident_mib_last"] > 1


def test_what_is_compared_with_is_a_whole_answer(server: Running) -> None:
    """A server that refuses, or answers another than it should, is told from one whose answers are alike."""
    prompt, _ = serve_load.prompt_of(0)
    text = asyncio.run(serve_load.alone(server.port, serve_load.greedy(0)))
    assert text
    with pytest.raises(SystemExit, match=f"gave '{prompt}' alone status 400"):
        asyncio.run(serve_load.alone(server.port, serve_load.greedy(0) | {"max_tokens": 0}))
    assert serve_load._judged(200, text, over=True, wanted=text) == "right"
    assert serve_load._judged(200, text + "x", over=True, wanted=text) == "failed: mixed up"
    assert serve_load._judged(200, text, over=False, wanted=text) == "failed: lost"
