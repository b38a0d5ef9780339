"""The picture of the loss's memory from kept curves: both panels on one scale, phases and the peak's line named."""

from pathlib import Path

import pytest

from tests.report.test_memory_pictures import words_of
from tightfit.report import figure
from tightfit.report.timeline import Timeline

GIB = 2**30


def test_the_picture_is_drawn_again_from_kept_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")  # the script sets it, in its own process only
    from benchmarks.loss_memory import draw, keep_curves

    starts = [(0.0, "forward"), (2.0, "loss"), (3.0, "backward"), (5.0, "optimizer")]
    positions = [float(at) for at in range(7)]
    plain = Timeline(positions, [g * GIB for g in (40, 50, 100, 60, 62, 60, 45)], [110 * GIB] * 7, starts)
    fused = Timeline(positions, [g * GIB for g in (40, 50, 58, 60, 63, 60, 45)], [70 * GIB] * 7, starts)
    keep_curves({"plain loss": plain, "fused loss": fused}, "a step", tmp_path)
    text = words_of(draw(tmp_path))
    for word in ("forward", "loss", "backward", "optimizer", "peak allocated", "reserved", "GiB", "milliseconds"):
        assert word in text
    assert "plain loss: peak 100.0 GiB allocated" in text
    assert "fused loss: peak 63.0 GiB allocated" in text
    scales: list[float] = []
    monkeypatch.setattr(figure, "_write", lambda made, _: scales.extend(axes.get_ylim()[1] for axes in made.axes))
    draw(tmp_path)
    assert scales == [pytest.approx(1.22 * 110)] * 2, "that of the taller one"
