"""What the page says batch invariance costs is what was measured last."""

import csv
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAID = {
    "one stream": "| one stream | {} | {} |",
    "16 requests": "| 16 requests of mixed lengths | {} | {} |",
    "a prompt of 512": "| a prompt of 512 | {} | {} |",
}


def measured(on_cpu: bool) -> list[dict[str, str]]:
    with (ROOT / "benchmarks/results/serve_invariant.csv").open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["device"].endswith("CPU") == on_cpu]


def test_the_page_has_the_newest_ratios_of_a_gpu() -> None:
    newest = {row["case"]: row for row in measured(on_cpu=False)}
    one, many, long = (newest[case] for case in ("one stream", "64 requests", "a prompt of 4096"))
    said = (
        f"{one['ratio']} times as long for one stream, {many['ratio']} times for 64 requests and {long['ratio']} times "
        f"for a prompt of 4096 tokens. With it none of the 64 answers differs from what its request gets alone; "
        f"without it {many['differing_plain']} do."
    )
    assert said in " ".join((ROOT / "docs/serving.md").read_text(encoding="utf-8").split())
    assert many["differing_invariant"] == "0"


def test_the_page_has_the_newest_ratios() -> None:
    newest = {(row["case"], row["half_weights"]): row for row in measured(on_cpu=True)}
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    for case, line in SAID.items():
        ratios = [newest[case, half]["processor_ratio"] for half in ("False", "True")]
        assert line.format(*ratios) in page
        assert newest[case, "False"]["rows_of_passes"] == "16 64"
        assert newest[case, "True"]["rows_of_passes"] == "1 4 16 64"
    many = [newest["16 requests", half] for half in ("False", "True")]
    assert {row["differing_invariant"] for row in many} == {"0"}
    assert {row["differing_plain"] for row in many} == {"0"}, "then the page should say how many"
