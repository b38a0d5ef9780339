"""Products with packed weights: the newest run alone, whoever made them, and a dash where one was not measured."""

from pathlib import Path

from benchmarks.reports.documentation import RESULTS
from benchmarks.reports.products import block_rows, is_chosen, newest_run, product_rows, products_measured

RUNS = """commit,device,torch,shape,rows,implementation,ms,copy_gb_s
a,cuda,2,1 x 4096 x 14336,1,bf16,0.5,4000
b,H200,2,1 x 4096 x 14336,1,bf16,0.031,4182.3
b,H200,2,1 x 4096 x 14336,1,w4a16 g128,0.0145,4182.3
b,H200,2,2048 x 4096 x 14336,2048,w4a16 g128,1.2345,4182.3
b,H200,2,1 x 14336 x 4096,1,marlin w4a16 g128 (vllm 1),0.02,4182.3
"""


def test_the_newest_run_is_told(tmp_path: Path) -> None:
    (tmp_path / "quantized_linear.csv").write_text(RUNS)
    header, rows = product_rows(tmp_path)
    assert header == ["inputs → outputs", "µs", "1 row", "2,048 rows"]
    assert rows == [
        ["4096 → 14336", "bf16", "31.0", "–"],
        ["4096 → 14336", "ours, w4a16 g128", "14.5", "1,234"],
        ["14336 → 4096", "marlin w4a16 g128 (vllm 1)", "20.0", "–"],
    ]
    assert products_measured(tmp_path) == "On H200, torch 2, at `b`; a plain copy moves 4,182 GB/s."


def test_what_is_chosen_on_hopper_is_as_fast_as_any_cut_measured() -> None:
    """To 5 %, and faster than what other cards get."""
    fastest: dict[tuple[str, str], float] = {}
    chosen: dict[tuple[str, str], float] = {}
    for row in newest_run(RESULTS, "packed_blocks"):
        case = row["rows"], row["inputs"]
        if row["block_m"]:
            fastest[case] = min(fastest.get(case, float("inf")), float(row["us"]))
            if is_chosen(row):
                chosen[case] = min(chosen.get(case, float("inf")), float(row["us"]))
    assert {("32", "4096"), ("64", "14336"), ("128", "4096"), ("256", "14336")} <= chosen.keys()
    assert all(us <= 1.05 * fastest[case] for case, us in chosen.items())
    header, rows = block_rows(RESULTS)
    assert len(rows) == 6
    for first in (0, 3):
        others, ours = rows[first + 1], rows[first + 2]
        assert others[1] == "ours, other cards"
        assert ours[1] == "ours, Hopper"
        assert all(float(b) < 0.75 * float(a) for a, b in zip(others[2:], ours[2:], strict=True))
    assert header[2:] == ["32 rows", "48 rows", "64 rows", "128 rows", "256 rows"]
