"""Reports of compressed models: what `evaluate --against` adds to, and what it leaves alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.compress.comparison import Comparison, Interval
from tightfit.report.compression_report import Compared, add_comparison

RESULT = Comparison(
    loss=Interval(0.1, None),
    original_loss=Interval(0.2, None),
    loss_difference=Interval(-0.1, None),
    kl=Interval(0.4, None),
    agreement=Interval(0.5, None),
    rows=2,
    tokens=80,
)
RECORD: dict[str, Any] = {
    "recipe": "rtn int8",
    "layers": [{"index": 0, "errors": {"mlp.up": 1e-3}, "layer_error": None}],
    "measured": {"result_bytes": 10},
    "predicted": {"original_bytes": 20},
    "comparisons": [],
}


def added(folder: Path, text: str) -> str:
    (folder / "report.json").write_text(text)
    add_comparison(folder, Compared("small", 10, RESULT), "large", ["test.txt"])
    return (folder / "report.json").read_text()


def test_what_was_measured_is_added_once(tmp_path: Path) -> None:
    once = added(tmp_path, json.dumps(RECORD))
    assert json.loads(once)["comparisons"][0]["kl"]["mean"] == pytest.approx(0.4)
    assert json.loads(added(tmp_path, once))["comparisons"] == json.loads(once)["comparisons"]
    assert (tmp_path / "report.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        '{"comparisons": []}',
        json.dumps({**RECORD, "comparisons": [1]}),
        json.dumps({**RECORD, "comparisons": {"a": 1}}),
        json.dumps({**RECORD, "layers": [{"index": "x", "errors": 1}]}),
        json.dumps({**RECORD, "layers": 7}),
        json.dumps({**RECORD, "recipe": None}),
        json.dumps({**RECORD, "measured": {"result_bytes": "many"}}),
        "[" * 5000,
    ],
)
def test_files_of_others_stay_as_they_are(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert added(tmp_path, text) == text
    assert "is no report of tightfit and stays as it is" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_directory_without_a_report_gets_none(tmp_path: Path) -> None:
    add_comparison(tmp_path, Compared("small", 10, RESULT), "large", ["test.txt"])
    assert list(tmp_path.iterdir()) == []
