"""Which rows of compression quality the pages show: ours beside torchao's over the same windows, rules beside rules."""

import csv
from pathlib import Path

from benchmarks.compress_entries import entries
from benchmarks.reports.compression import fewer_windows_rows, nearest_rows, same_numbers_rows, static_rows, static_text

STATIC = "int8 per channel (static int8 activations), "
COLUMNS = ("package", "method", "scheme", "bits", "length", "windows", "perplexity", "kl")


def table(path: Path, *rows: tuple[str, ...]) -> Path:
    """A table of these rows, with what they have in common."""
    same = {"original_perplexity": "20", "loss_difference": "0.1", "loss_difference_half_width": "0.01"}
    same |= {"bits_per_weight": "4.1", "agreement": "0.9", "calibration": "8 x 512 sequential"}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *same])
        writer.writeheader()
        writer.writerows(dict(zip(COLUMNS, row, strict=True)) | same for row in rows)
    return path


def test_rounding_is_compared_over_the_same_windows(tmp_path: Path) -> None:
    path = table(
        tmp_path / "rows.csv",
        ("tightfit", "rtn", "int3 g64 asym", "3", "512", "256", "99", "1.5"),  # older than the next of ours
        ("tightfit", "rtn", "int3 g64 asym", "3", "512", "32", "90", "1.2"),
        ("torchao", "rtn", "int3 g64 asym", "3", "512", "32", "100", "1.4"),
        ("tightfit", "rtn", "int4 g64 asym", "4", "512", "32", "40", "0.3"),
        ("torchao", "rtn", "int4 g64 asym", "4", "512", "256", "41", "0.3"),  # other windows
        ("tightfit", "rtn", "int8 per channel (int8 activations)", "8", "512", "32", "21", "0.1"),
    )
    assert nearest_rows(path)[1] == [("3", "90.00", "100.00", "-10.0%", "1.2000", "1.4000", "32")]


def test_methods_are_compared_in_the_same_numbers(tmp_path: Path) -> None:
    """Not with wider codes that are no larger than somebody's of another layout."""
    path = table(
        tmp_path / "rows.csv",
        ("tightfit", "round", "int5 g64 asym", "5", "512", "256", "30", "0.01"),
        ("tightfit", "round", "int4 g64 asym", "4", "512", "256", "31", "0.07"),
        ("tightfit", "gptq", "int4 g64 asym", "4", "512", "256", "32", "0.11"),
        ("auto-round", "auto-round", "int4 g64 asym", "4", "512", "256", "31.5", "0.09"),
        ("gptqmodel", "gptq", "int4 g64 asym", "4", "512", "256", "35", "0.18"),
        ("llama.cpp", "gguf", "q4_k_m", "4", "512", "256", "29", "0.03"),
        ("tightfit", "gptq", "int3 g64 asym", "3", "512", "256", "43", "0.4"),
        ("gptqmodel", "gptq", "int3 g64 asym", "3", "512", "256", "60", "0.7"),
    )
    assert same_numbers_rows(path, 512)[1] == [
        ("int4 g64 asym", "4.10", "round: 31.00, 0.0700", "auto-round (AutoRound): 31.50, 0.0900"),
        ("int3 g64 asym", "4.10", "gptq: 43.00, 0.4000", "gptq (GPTQModel): 60.00, 0.7000"),
    ]


def test_methods_of_fewer_windows_are_told_apart(tmp_path: Path) -> None:
    whole = [("tightfit", f"method {i}", "int3", "3", "512", "256", "30", "0.1") for i in range(8)]
    same = ("tightfit", "method 1", "int3", "3", "512", "16", "31", "0.1")
    other = ("tightfit", "spqr", "int3 g16 asym", "3", "512", "16", "32", "0.2")
    theirs = ("torchao", "rtn", "int3", "3", "512", "16", "35", "0.3")
    path = table(tmp_path / "rows.csv", *whole, same, other, theirs)
    assert [(*row[1:7], row[9]) for row in fewer_windows_rows(path, (512,))[1]] == [
        ("`spqr`", "int3 g16 asym", "tightfit", "4.10", "16 × 512", "32.00", ""),
        ("rtn", "int3", "torchao", "4.10", "16 × 512", "35.00", "method 1: 31.00, 0.1000"),
    ]


def test_rules_of_static_scales_beside_a_scale_per_token(tmp_path: Path) -> None:
    path = table(
        tmp_path / "rows.csv",
        ("tightfit", "rtn", "int8 per channel (int8 activations)", "8", "512", "256", "20.5", "0.1"),
        ("tightfit", "rtn", "int8 per channel (int8 activations)", "8", "512", "16", "21", "0.1"),
        ("tightfit", "rtn", STATIC + "minmax", "8", "512", "16", "30", "0.5"),
        ("tightfit", "rtn", STATIC + "mse", "8", "512", "16", "25", "0.4"),
        ("tightfit", "rtn", STATIC + "mse", "8", "2048", "4", "24", "0.4"),
        ("tightfit", "fp8", "fp8 (fp8 activations)", "8", "512", "16", "22", "0.1"),
    )
    assert [row[:3] for row in static_rows(path)[1]] == [
        ("`rtn`", "per token", "21.00"),
        ("`rtn`", "static, mse", "25.00"),
        ("`rtn`", "static, minmax", "30.00"),
    ]
    assert static_text(path).startswith("16 windows of 512 tokens")
    assert static_text(tmp_path / "none.csv") == "Static scales have not been measured yet."


def test_rows_have_names_of_their_own() -> None:
    named = [(entry.package, entry.name, entry.describe()) for entry in entries(64, 200)]
    assert len(set(named)) == len(named)
    assert ("rtn", STATIC + "kl") in {name[1:] for name in named}
