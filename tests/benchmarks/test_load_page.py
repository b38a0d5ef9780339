"""What docs/serving.md says of a server under load is what the rows say."""

import csv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_says_what_the_rows_say() -> None:
    with (ROOT / "benchmarks" / "results" / "serve_load.csv").open(encoding="utf-8", newline="") as file:
        rows = {(row["model"], row["batch_invariant"]): row for row in csv.DictReader(file)}
    same, usual = (rows["smollm2-135m-instruct", kind] for kind in ("True", "False"))
    tiny = rows["tiny-model", "True"]
    told = [
        f"{int(same['right']):,} right, none lost or mixed up, {same['hung_up']} hung up on",
        f"resident memory {int(same['resident_mib_settled']):,} MiB after a third of the time and at the end",
        f"{usual['failed']} of {int(usual['right']) + int(usual['failed']):,} were not the answer given alone",
        f"{int(tiny['right']):,} right, none lost or mixed up",
    ]
    page = " ".join((ROOT / "docs" / "serving.md").read_text(encoding="utf-8").split())
    assert [each for each in told if each not in page] == []
    assert same["resident_mib_settled"] == same["resident_mib_last"]
    assert same["failed"] == tiny["failed"] == "0"
    assert {row["blocks_left"] for row in (same, usual, tiny)} == {"0"}
