"""The server's table has the newest row of every case; starts have a table of their own, by phase."""

from pathlib import Path

from benchmarks.reports.documentation import ROOT
from benchmarks.reports.serving import (
    CASES,
    beside,
    newest_predictions,
    newest_speeds,
    prediction_error,
    speed_commits,
    speed_rows,
)
from benchmarks.rows import RESULTS

OURS = """commit,device,model,case,value,unit,seconds,dtype,note
a,H200,1b,one_stream_decode,100,tok/s,1,bfloat16,
b,H200,1b,one_stream_decode,1234.5,tok/s,1,bfloat16,
b,H200,1b,one_stream_decode,7,tok/s,1,int4,
c,H200,8b,start,3.21,s,1,bfloat16,
"""
STARTS = """commit,device,model,kind,start_s
a,H200,8b,first,20.1
a,H200,8b,first,11.44
a,H200,8b,next,2.5
a,H200,8b-int4,first,7
"""
THEIRS = """engine,model,case,value,unit,note
vLLM 1,1b,one_stream_decode,99.6,tok/s,
other,1b,start,1,s,
vLLM 1,8b,start,47,s,
"""
TOGETHER = """vLLM 2,1b,one_stream_decode,98,tok/s,prompt 256; beside ours at a
vLLM 2,8b,start,40,s,
"""


def test_the_newest_row_of_a_case_counts(tmp_path: Path) -> None:
    (tmp_path / "serve_speed.csv").write_text(OURS)
    (tmp_path / "serve_start.csv").write_text(STARTS)
    (tmp_path / "serve_peers.csv").write_text(THEIRS)
    header, rows = speed_rows(tmp_path)
    assert header[0::2] == ["", "vLLM", "vLLM"]
    found = {row[0]: row[1:] for row in rows}
    assert list(found) == list(CASES.values())
    assert found["one stream, tokens/s"] == ["1,234", "100", "–", "–"]
    assert found["first start on a machine, s"] == ["–", "–", "11.4", "47"]
    assert found["next start, s"] == ["–", "–", "2.5", "–"]
    assert found["first token after 256, ms"] == ["–"] * 4
    apart = "vLLM 1 ran the same workloads on such a card another day, not in one run with us (`serve_peers.csv`)."
    assert speed_commits(tmp_path) == f"Ours on H200 at `b`, `a`. {apart}"


def test_rows_of_one_run_stand_beside_each_other(tmp_path: Path) -> None:
    """Ours of that commit then, not the newest; starts of ours have a table of their own."""
    (tmp_path / "serve_speed.csv").write_text(OURS)
    (tmp_path / "serve_start.csv").write_text(STARTS)
    (tmp_path / "serve_peers.csv").write_text(THEIRS + TOGETHER)
    found = {row[0]: row[1:] for row in speed_rows(tmp_path)[1]}
    assert found["one stream, tokens/s"] == ["100", "98", "–", "–"]
    assert found["first start on a machine, s"] == ["–", "–", "11.4", "40"]
    told = "vLLM 2 ran by turns with ours at `a` in one run on one machine (`serve_peers.csv`)."
    assert speed_commits(tmp_path) == f"Ours on H200 at `a`. {told}"
    with (tmp_path / "serve_peers.csv").open("a") as file:
        file.write("vLLM 2,8b,batch,1,tok/s,beside ours at b\n")
    assert beside(tmp_path) is None


def test_the_page_says_what_first_requests_of_new_lengths_took() -> None:
    newest = newest_speeds(RESULTS)
    first, second = (float(newest["1b", case]["seconds"]) for case in ("mixed_first", "mixed"))
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
