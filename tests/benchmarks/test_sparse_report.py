"""The table of 2:4 products: the newest row of a case, in the order in which cases were measured."""

from pathlib import Path

from benchmarks.reports.sparse import COLUMNS, sparse_rows

HEADER = "date,commit,form,rows,outputs,inputs,graph_ms,called_ms,tflop_s,relative_error,gain\n"


def test_newest_row_of_a_case(tmp_path: Path) -> None:
    path = tmp_path / "sparse_graphs.csv"
    path.write_text(
        HEADER
        + "d,a,dense,8192,14336,4096,1.3,1.31,740.2,0,1.0\n"
        + "d,a,cutlass,8192,14336,4096,1.0,1.2,962.1,0,1.3\n"
        + "d,b,dense,8192,14336,4096,1.25,1.26,769.8,0,1.0\n"
    )
    header, lines = sparse_rows(path)
    assert header == COLUMNS
    assert lines == [
        ["8,192", "4096", "14336", "dense", "1.250", "1.260", "770", "1.00", "`b`"],
        ["8,192", "4096", "14336", "cutlass", "1.000", "1.200", "962", "1.30", "`a`"],
    ]
