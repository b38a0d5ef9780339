"""The table of distillation losses: the newest row of a case, its shape's products alone before it."""

from pathlib import Path

from benchmarks.reports.distillation import COLUMNS, distillation_measured, distillation_rows

HEADER = "commit,device,torch,loss,rows,width,teacher_width,vocabulary,ms,ideal_ms,peak_gib\n"


def test_newest_row_of_a_case(tmp_path: Path) -> None:
    path = tmp_path / "distill_loss.csv"
    path.write_text(
        HEADER
        + "a,H200,2.11,tightfit jsd,16384,2048,4096,128256,99.0,63.7,1.9\n"
        + "a,H200,2.11,liger fused jsd,16384,2048,4096,128256,139.2,63.7,2.753\n"
        + "a,H200,2.11,tightfit jsd,8192,4096,4096,128256,62.1,52.4,3.061\n"
        + "b,H200,2.12,tightfit jsd,16384,2048,4096,128256,83.7,63.7,1.783\n"
    )
    header, lines = distillation_rows(path)
    assert header == COLUMNS
    assert lines == [
        ("16,384", "2048, 4096", "the four products alone", "64", ""),
        ("16,384", "2048, 4096", "tightfit jsd", "84", "1.78"),
        ("16,384", "2048, 4096", "liger fused jsd", "139", "2.75"),
        ("8,192", "4096, 4096", "the four products alone", "52", ""),
        ("8,192", "4096, 4096", "tightfit jsd", "62", "3.06"),
    ]
    assert distillation_measured(path) == "A vocabulary of 128,256, bf16, on H200, torch 2.11, at `b`, `a`."
