"""The server's table has the newest row of every case; starts have a table of their own, by phase."""

from pathlib import Path

import pytest

from benchmarks.reports.compression import _served, commits_apart, served_rows
from benchmarks.reports.documentation import ROOT
from benchmarks.reports.serving import (
    CASES,
    DTYPE,
    behind_text,
    beside,
    memory_measured,
    memory_rows,
    newest_memory,
    newest_predictions,
    newest_speeds,
    prediction_error,
    speed_commits,
    speed_rows,
    times_as_fast,
)
from benchmarks.rows import RESULTS

OURS = """date,commit,device,model,case,value,unit,seconds,dtype,note
2026-01-01,a,H200,1b,one_stream_decode,100,tok/s,1,bfloat16,
2026-01-01,b,H200,1b,one_stream_decode,1234.5,tok/s,1,bfloat16,
2026-01-01,b,H200,1b,one_stream_decode,7,tok/s,1,int4,
2026-01-01,c,H200,8b,start,3.21,s,1,bfloat16,
2026-01-03,d,H200,8b,start,6.6,s,1,w8a8,
2026-01-03,d,H200,8b,batch,8000,tok/s,1,w8a8,
"""
STARTS = """date,commit,device,model,kind,start_s
2026-01-01,a,H200,8b,first,20.1
2026-01-02,a,H200,8b,first,11.44
2026-01-02,a,H200,8b,next,2.5
2026-01-02,a,H200,8b-w8a8,first,7
2026-01-02,a,H200,8b-int4,first,7
"""
WHOLE = "4.00 for 5.00 (−20.0 %)"
THEIRS = """engine,model,dtype,case,value,unit,note
vLLM 1,1b,bfloat16,one_stream_decode,99.6,tok/s,
other,1b,bfloat16,start,1,s,
vLLM 1,8b,bfloat16,start,47,s,
vLLM 1,8b,w8a8,start,6,s,
vLLM 1,8b,w8a8,batch,10000,tok/s,
vLLM 1,8b,w8a8,mixed,11000,tok/s,
"""
TOGETHER = """vLLM 2,1b,bfloat16,one_stream_decode,98,tok/s,prompt 256; beside ours at a
vLLM 2,8b,bfloat16,start,40,s,
"""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for name, text in (("speed", OURS), ("start", STARTS), ("peers", THEIRS)):
        (tmp_path / f"serve_{name}.csv").write_text(text)
    return tmp_path


def test_the_newest_row_of_a_case_counts(results: Path) -> None:
    header, rows = speed_rows(results)
    assert header[0::2] == ["", *["vLLM"] * 3]
    found = {row[0]: row[1:] for row in rows}
    assert list(found) == list(CASES.values())
    assert found["one stream, tokens/s"] == ["1,234", "100", *["–"] * 4]
    assert found["first start on a machine, s"] == ["–", "–", "11.4", "47", "7", "6"]
    assert found["next start, s"] == ["–", "–", "2.5", "–", "–", "–"]
    assert found["first token after 256, ms"] == ["–"] * 6
    apart = "the same workloads on such a card another day, not in one run with us (1B, 8B, 8B in w8a8)"
    assert speed_commits(results) == f"Ours on H200 at `b`, `a`, `d`. vLLM 1 ran {apart}."


def test_rows_of_one_run_stand_beside_each_other(results: Path) -> None:
    """Ours of that commit then, not the newest; starts of ours have a table of their own."""
    (results / "serve_peers.csv").write_text(THEIRS + TOGETHER)
    found = {row[0]: row[1:] for row in speed_rows(results)[1]}
    assert found["one stream, tokens/s"] == ["100", "98", *["–"] * 4]
    assert found["first start on a machine, s"] == ["–", "–", "11.4", "40", "7", "6"]
    told = (
        "vLLM 2, vLLM 1 ran by turns with ours in one run on one machine (1B at `a`); the same workloads on such a "
        "card another day, not in one run with us (8B, 8B in w8a8)."
    )
    assert speed_commits(results) == f"Ours on H200 at `a`, `d`. {told}"
    with (results / "serve_peers.csv").open("a") as file:
        file.write("vLLM 2,1b,bfloat16,batch,1,tok/s,beside ours at b\n")
    assert beside(results, "1b", DTYPE) is None


def test_where_the_peer_is_ahead_is_said(results: Path) -> None:
    assert behind_text(results) == (
        "Slower than vLLM, by these rows: 8B in w8a8, 64 × (256 + 256): 80.0%; 8B in w8a8, first start on a machine: "
        "85.7% of its speed. Measured of vLLM alone: 8B in w8a8, 256 of mixed lengths."
    )


def test_rows_of_another_commit_name_it(results: Path) -> None:
    _, rows = served_rows(results / "serve_speed.csv", "1b")
    assert rows[0] == ("bfloat16", "1,234", "–", "–", "–", "`b`")
    old = {"case": "prefill", "commit": "a"}
    new = {"case": "batch", "commit": "b"}
    assert commits_apart([old, new]) == {"prefill": "a"}
    assert commits_apart([old, new, old | {"commit": "b"}]) == {}
    assert _served({"value": "1000"}, "a") == "1,000 (`a`)"


def test_memory_is_told_line_by_line(tmp_path: Path) -> None:
    assert memory_measured(tmp_path) == "Not measured yet."
    lines = {"weights": (1024, 1024), "cache": (2048, 2048), "graphs": (512, 256), "step": (512, 1024)}
    values: dict[str, str] = {"device": "H200", "commit": "a", "model": "8b", "weights_in": "int4"}
    for line, (predicted, taken) in {**lines, "total": (4096, 4096 * 1.25)}.items():
        values |= {f"predicted_{line}_mib": str(predicted), f"{line}_mib": str(taken)}
    (tmp_path / "serve_memory.csv").write_text(f"{','.join(values)}\n{','.join(values.values())}\n")
    header, rows = memory_rows(tmp_path)
    assert len(header) == len(rows[0])
    assert rows == [["8B", "int4", *(f"{a / 1024:.2f} for {b / 1024:.2f}" for a, b in lines.values()), WHOLE]]
    assert memory_measured(tmp_path) == "On H200 at `a`."


def test_what_was_measured_of_memory_is_near_what_was_predicted() -> None:
    """The whole within two parts in a hundred, once there are rows."""
    errors = [float(row["predicted_total_mib"]) / float(row["total_mib"]) - 1 for row in newest_memory(RESULTS)]
    assert all(abs(error) <= 0.02 for error in errors), errors


def test_the_page_says_what_first_requests_of_new_lengths_took() -> None:
    newest = newest_speeds(RESULTS)
    first, second = (float(newest["1b", DTYPE, case]["seconds"]) for case in ("mixed_first", "mixed"))
    page = " ".join((ROOT / "docs" / "serving.md").read_text(encoding="utf-8").split())
    assert f"the 256 mixed ones took {first:.1f} s the first time and {second:.1f} s the second" in page


def test_predictions_for_cpus_are_near_what_was_measured() -> None:
    """docs/serving.md says so of every row: first tokens and those after them."""
    errors = {
        (row["device"], row["model"], row["weights"], row["at_once"], row["prompt_tokens"], name): prediction_error(
            row, name
        )
        for row in newest_predictions(RESULTS)
        for name in ("first_token_ms", "between_tokens_ms")
    }
    assert errors
    assert {case: error for case, error in errors.items() if abs(error) > 0.25} == {}


def test_the_readme_says_how_far_ahead_an_8b_model_is() -> None:
    ratios = times_as_fast(RESULTS)
    shared = [ratios["8b", DTYPE, case] for case in ("batch", "mixed", "prefill")]
    assert all(1 < ratio < 1.2 for ratio in shared), "less than a fifth ahead in 16 bits"
    assert all(ratios["8b", "w8a8", case] > 1 for case in ("batch", "mixed", "prefill"))
    assert all(ratios["8b", "fp8", case] < 1 for case in ("batch", "mixed")), "behind where inputs are not rounded"
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "less than a fifth ahead of vLLM in 16 bits, and behind it with fp8 weights whose inputs are not" in page
