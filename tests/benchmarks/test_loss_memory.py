"""The picture of the loss's memory: simulated curves on one scale, measured peaks, phases and lines named."""

import csv
from pathlib import Path

import pytest

from benchmarks.rows import PICTURES, RESULTS
from tests.report.test_memory_pictures import words_of
from tightfit.report import figure

COLUMNS = ("model", "sequence_length", "loss", "peak_gib", "device")
NAMED = ("forward", "loss", "backward", "optimizer", "allocated", "peak allocated", "reserved", "peak measured", "GiB")
WORST = 0.01
"""Relative error of the simulated peaks that the page states."""


@pytest.fixture(autouse=True)
def _launching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")  # the script sets it, in its own process only


def test_the_picture_names_its_lines_and_shows_the_newest_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.loss_memory import draw

    peaks = [("plain loss", 9.0), ("fused loss", 8.0), ("plain loss", 2.5), ("fused loss", 1.5)]
    with (tmp_path / "loss_memory.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(("tiny-llama", 256, loss, peak, "A Card") for loss, peak in peaks)
        writer.writerow(("tiny-llama", 128, "plain loss", 7.0, "Another"))
    text = words_of(draw("tiny-llama", 256, tmp_path))
    for word in (*NAMED, "curves: simulated", "measured on one A Card"):
        assert word in text
    assert "GiB allocated (2.5 measured)" in text
    assert "GiB allocated (1.5 measured)" in text
    scales: list[float] = []
    monkeypatch.setattr(figure, "_write", lambda made, _: scales.extend(axes.get_ylim()[1] for axes in made.axes))
    draw("tiny-llama", 256, tmp_path)
    assert scales == [pytest.approx(1.22 * 2.5)] * 2, "that of the taller one"


def test_without_measurements_there_are_no_marks(tmp_path: Path) -> None:
    from benchmarks.loss_memory import draw

    text = words_of(draw("tiny-llama", 128, tmp_path))
    assert "simulated" in text
    assert "measured" not in text


def test_the_stored_picture_shows_the_stored_rows() -> None:
    """And simulated peaks are as near to them as the page says."""
    from benchmarks.loss_memory import measured_peaks

    text = words_of(PICTURES / "loss_memory.png")
    peaks, device = measured_peaks("llama-3.1-8b", 32_768, RESULTS)
    assert all(word in text for word in (*NAMED, device))
    for loss, peak in peaks.items():
        title = next(line for line in text.splitlines() if line.startswith(loss))
        simulated = float(title.split("peak ")[1].split()[0])
        assert f"({peak / 2**30:.1f} measured)" in title
        assert simulated == pytest.approx(peak / 2**30, rel=WORST)
