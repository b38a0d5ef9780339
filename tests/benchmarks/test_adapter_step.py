"""The script that measures a step of adapters: its rows on a CPU, ours and PEFT's."""

from benchmarks.adapter_step import CASES, rows


def test_rows_have_predictions_beside_what_was_measured() -> None:
    ours, *peers = rows("cpu-tiny", CASES["cpu-tiny"])
    assert {row["implementation"] for row in peers} <= {"peft"}
    assert all(row.keys() == ours.keys() and float(row["tokens_per_second"]) > 0 for row in (ours, *peers))
    assert float(ours["formula_gib"]) > 0
    assert not any(row["formula_gib"] for row in peers)


def test_cases_of_the_card_can_be_predicted() -> None:
    for name, case in CASES.items():
        assert case.workload.adapted is not None, name
        assert case.device == "cuda" or name == "cpu-tiny"
