"""Generated tables are up to date, README commands run as written, and links lead somewhere."""

import csv
import re
from functools import partial
from pathlib import Path

import pytest

from benchmarks.reports.documentation import ROOT, TRUTH, markdown_table, pages, refreshed, steps_by_column
from benchmarks.reports.planning import EXAMPLES, example_rows
from benchmarks.routed_step import ROUTED
from benchmarks.rows import RESULTS
from tests.covering import sampled


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_generated_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert refreshed(text, but="plan-examples") == text, "run `make docs`"


def test_the_readme_says_how_far_wide_experts_are_from_their_goal() -> None:
    with (RESULTS / "routed_step.csv").open(encoding="utf-8", newline="") as file:
        ms = {(row["case"], row["implementation"]): float(row["step_ms_p50"]) for row in csv.DictReader(file)}
    ratio = ms["h200-mixtral", "huggingface grouped_mm"] / ms["h200-mixtral", "tightfit"]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert ("train less than 1.5 times as fast as in transformers with grouped products" in readme) == (ratio < 1.5)


def test_rows_of_other_runs_are_not_beside_the_newest(tmp_path: Path) -> None:
    header = "commit,case,implementation,model,batch,sequence_length,step_ms_p50,peak_gib\n"
    rows = "a,c,ours,m,2,64,9.0,1.0\na,c,theirs,m,2,64,8.0,1.0\nb,c,ours,m,2,64,7.0,1.0\n"
    (tmp_path / "steps.csv").write_text(header + rows)
    table = steps_by_column(tmp_path / "steps.csv", {"ours": "ours", "theirs": "theirs"})
    assert table.splitlines()[-1] == "| m shape, 2 × 64 tokens | 7.0 ms, 1.0 GiB | – | `b` |"


def test_the_page_says_of_how_many_layers_routed_steps_are() -> None:
    layers = {
        name: case.reshape.keywords["layers"] for name, case in ROUTED.items() if isinstance(case.reshape, partial)
    }
    alike = ("h200-qwen3", "h200-olmoe", "h200-deepseek-v2"), ("h200-gpt-oss", "h200-mixtral")
    (first,), (second,) = ({layers.pop(name) for name in names} for names in alike)
    assert not layers
    page = " ".join((ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8").split())
    said = "of Qwen3-MoE with 64 of its experts, of OLMoE and of DeepSeek-V2-Lite"
    assert f"{first} {said}, {second} of gpt-oss-20b and of Mixtral" in page


@sampled(3)
@pytest.mark.parametrize(
    "number", range(len(EXAMPLES)), ids=lambda number: f"{EXAMPLES[number][0]} {EXAMPLES[number][1]}"
)
def test_examples_of_plans_are_up_to_date(number: int) -> None:
    """Each takes a search of its own, seconds of a core together."""
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- begin plan-examples -->\n(.*?)\n<!-- end plan-examples -->", page, flags=re.DOTALL)
    header, rule, *rows = block.splitlines()
    assert len(rows) == len(EXAMPLES)
    assert [header, rule, rows[number]] == markdown_table(*example_rows(EXAMPLES[number : number + 1])).splitlines()


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_and_pictures_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


def test_markdown_table_escapes_bars() -> None:
    assert markdown_table(("a", "b"), [("x|y", "z")]) == "| a | b |\n| --- | --- |\n| x\\|y | z |"


def test_pages_know_nothing_of_where_they_were_written() -> None:
    words = re.compile(r"/root/|/home/\w+/|/tmp/\w")
    assert [str(page) for page in pages() if words.search(page.read_text(encoding="utf-8"))] == []
    assert (ROOT / "README.md").is_file()


def test_the_readme_is_two_screens() -> None:
    """Rendered lines: without markers, fences and the lines between paragraphs."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip() and not line.startswith(("<!--", "```", "| ---"))]) <= 95
    for said in ("Never measured: anything over NCCL on more than one GPU", "tightfit serve", "tightfit compress"):
        assert any(said in line for line in lines)


def test_the_readme_says_what_the_estimates_were_laid_beside() -> None:
    with TRUTH.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lengths = [int(row["sequence_length"]) for row in rows]
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"135M to 8B, {min(lengths):,} to {max(lengths):,} tokens, every lever, ZeRO 0 to 3" in page
    assert {"smollm2-135m", "llama-3.1-8b"} <= {row["model"] for row in rows}
    assert {row["zero"] for row in rows} == {"0", "1", "2", "3"}


def test_one_claim_has_one_number() -> None:
    """8B at 8,192 tokens without levers is measured by two benchmarks; pages quote hf_step.csv alone."""
    from benchmarks.reports.documentation import LEVERS, hf_step, train_step
    from benchmarks.reports.records import record_rows

    _, rows = record_rows(LEVERS)
    assert not [row for row in rows if row[0] == "8B, 8,192 tokens" and "`" not in row[1]]
    assert [row for row in rows if row[0] == "8B, 8,192 tokens"]
    ms = {float(found) for found in re.findall(r"([\d.]+) ms", hf_step())}
    speeds = {int(found.replace(",", "")) for found in re.findall(r"huggingface[\w+]* \| ([\d,]+)", train_step())}
    tokens = {round(count / each * 1e3) for each in ms for count in (8192, 16384)}
    quoted = [speed for speed in speeds if speed < 60_000]
    assert len(quoted) == 6
    assert all(any(abs(speed / each - 1) < 0.001 for each in tokens) for speed in quoted)


def test_the_page_on_compressing_says_what_packed_products_took() -> None:
    with (RESULTS / "packed_tiles.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["shape"] == "28672x4096"]
    took = {(row["rows"], row["cut"]): f"{float(row['us']):.0f}" for row in rows}
    page = " ".join((ROOT / "docs" / "compressing.md").read_text(encoding="utf-8").split())
    assert f"takes {took['1', 'best']} µs on an H200 with the best cut where bf16 takes {took['1', 'bf16']}" in page
    assert f"64 rows {took['64', 'best']} µs" in page


def test_the_page_on_compressing_says_how_fast_an_8b_model_answers() -> None:
    """The newest row of one stream's decoding, for each kind of weight."""
    with (RESULTS / "serve_speed.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["model"], row["case"]) == ("8b", "one_stream_decode")]
    speed = {row["dtype"]: f"{float(row['value']):.0f}" for row in rows}
    page = " ".join((ROOT / "docs" / "compressing.md").read_text(encoding="utf-8").split())
    assert f"one stream at {speed['int4']} tokens/s in 4 bits and at {speed['fp8']} in 8-bit floats" in page
    assert f"(`benchmarks/results/serve_speed.csv`; bf16 {speed['bfloat16']})" in page
    assert f"in 8 bits too at {speed['int4+head8']}, in 4 bits at {speed['int4+head4']} (" in page
    serving = " ".join((ROOT / "docs" / "serving.md").read_text(encoding="utf-8").split())
    assert f"one stream of 8B then runs at {speed['fp8']} and {speed['int4']} tokens/s" in serving
