"""Pictures show the formulas' own numbers, schedules wait as long as the papers say, and mistakes get a sentence."""

import csv
import re
import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image
from typer.testing import CliRunner

from benchmarks.reports.documentation import ROOT
from benchmarks.reports.scatter import draw_truth, errors, points
from tests.covering import sampled
from tightfit.cli.main import app
from tightfit.errors import UserError
from tightfit.jobs.layout import Layout, PipelineSchedule
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas import gpt
from tightfit.memory.formulas.overheads import Overheads
from tightfit.memory.formulas.pipeline import micro_batches_in_flight
from tightfit.memory.formulas.training import peaks
from tightfit.models.presets import preset
from tightfit.plan.seconds.pipeline import bubble_share
from tightfit.report.memory import COLORS, Bar, Card, _clear_of, bar, draw_memory, draw_zero
from tightfit.report.pipeline import draw_pipeline
from tightfit.report.pipeline_schedule import SCHEDULES, TimedTask, checked, idle_share, simulate_schedule

LLAMA = "llama-3.1-8b"
CARDS = [Card("80 GB", 80 * 10**9)]
TRUTH_COLUMNS = (
    "model",
    "formula_gib",
    "simulated_gib",
    "measured_gib",
    "simulated_reserved_gib",
    "measured_reserved_gib",
)


def text_of(path: Path) -> str:
    """All words of an SVG."""
    return " ".join(element.text or "" for element in ElementTree.parse(path).iter())


def words_of(path: Path) -> str:
    """All words of a PNG of ours, which carries them."""
    said: str = Image.open(path).text["Description"]  # type: ignore[attr-defined]
    return said


def test_a_bar_is_as_high_as_the_peak() -> None:
    spec, levers = preset(LLAMA), Levers(checkpoint_every=1)
    drawn = bar(spec, 4096, levers, data=8, zero=3)
    workload = Workload(spec=spec, sequence_length=4096, global_batch=16)
    assert drawn.bytes == peaks(workload, Layout(micro_batch=1, data=8, zero=3), levers, Overheads(0, 0, 0)).gpu_bytes
    assert set(drawn.parts) == set(COLORS)
    assert all(drawn.parts.values())


def test_parameters_gradients_and_states_of_a_bar_are_16_bytes_a_weight() -> None:
    spec = preset(LLAMA)
    parts = bar(spec, 16384, Levers()).parts
    assert parts["parameters"] == 2 * spec.params()
    assert parts["optimizer states"] == 12 * spec.params()
    assert 2 * spec.params() <= parts["gradients"] <= 2.3 * spec.params()


def test_the_classic_layer_can_be_drawn() -> None:
    spec = preset(LLAMA)
    drawn = bar(spec, 16384, Levers(), layer="classic")
    assert drawn.parts["activations"] == gpt.model_bytes(1, 16384, 4096, 32, 32)


def test_memory_over_lengths_has_every_model_length_and_card(tmp_path: Path) -> None:
    models = {name: preset(name) for name in (LLAMA, "llama-3.1-70b")}
    made = draw_memory(models, (1024, 16384), CARDS, tmp_path / "memory.svg")
    heights = {name: [one.bytes for one in bars] for name, bars in made.items()}
    assert heights[LLAMA] == sorted(heights[LLAMA])
    assert min(heights["llama-3.1-70b"]) > max(heights[LLAMA])
    words = text_of(tmp_path / "memory.svg")
    for word in (*models, "1 K", "16 K", "80 GB", *COLORS):
        assert word in words
    for bars in made.values():
        for one in bars:
            assert f"{one.bytes / 2**30:,.0f}" in words


def test_stages_of_zero_shrink_the_bars(tmp_path: Path) -> None:
    made = draw_zero(LLAMA, preset(LLAMA), 8, (1024, 4096), CARDS, tmp_path / "zero.png")
    assert list(made) == ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    heights = [bars[0].bytes for bars in made.values()]
    assert heights == sorted(heights, reverse=True)
    assert (tmp_path / "zero.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_come_out_the_same_every_time(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        draw_pipeline(["1f1b"], 2, 4, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def held_at_once(made: list[TimedTask], rank: int) -> int:
    """Most micro-batches (or pieces of them) whose forward has ended and whose last backward has not, on `rank`."""
    own = [timed for timed in made if timed.rank == rank]
    last = "weights" if any(timed.task.work == "weights" for timed in own) else "backward"
    changes = [(timed.start, 1) for timed in own if timed.task.work == "forward"]
    changes += [(timed.end, -1) for timed in own if timed.task.work == last]
    held = most = 0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "batches"), [(1, 4), (2, 4), (4, 8), (4, 16), (8, 16)])
def test_schedules_do_everything_in_order_and_wait_as_the_papers_say(
    schedule: PipelineSchedule, ranks: int, batches: int
) -> None:
    made = simulate_schedule(schedule, ranks, batches, pieces=2)
    pieces = 2 if schedule in ("interleaved", "zb-v") else 1
    splits_backward = schedule in ("zero-bubble", "zb-v")
    ended = {timed.task: timed.end for timed in made}
    assert len(ended) == len(made) == ranks * batches * pieces * (3 if splits_backward else 2)
    for timed in made:
        before = timed.task._replace(stage=timed.task.stage + (-1 if timed.task.work == "forward" else 1))
        assert ended.get(before, 0) <= timed.start or timed.task.work == "weights"
        assert timed.task.work == "forward" or ended[timed.task._replace(work="forward")] <= timed.start
    for rank in range(ranks):
        own = sorted((timed.start, timed.end) for timed in made if timed.rank == rank)
        assert all(end <= start for (_, end), (start, _) in pairwise(own))
    expected = bubble_share(ranks, batches, pieces)
    if splits_backward:  # (K − 1) units of 3 M + K − 1, half as many in a V
        waited = (ranks - 1) / pieces
        expected = waited / (3 * batches + waited)
    assert idle_share(made, ranks) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-v", "2bw"])
def test_schedules_hold_what_the_memory_formulas_count(schedule: PipelineSchedule) -> None:
    ranks, batches = 4, 12
    made = simulate_schedule(schedule, ranks, batches, pieces=2)
    layout = Layout(pipeline=ranks, schedule=schedule, stages_per_rank=2 if schedule in ("interleaved", "zb-v") else 1)
    for rank in range(ranks):
        assert held_at_once(made, rank) == sum(micro_batches_in_flight(layout, rank, batches))


def test_zero_bubble_holds_no_more_than_the_formulas_count() -> None:
    made = simulate_schedule("zero-bubble", 4, 12)
    counted = micro_batches_in_flight(Layout(pipeline=4, schedule="zero-bubble"), 0, 12)
    assert (max(held_at_once(made, rank) for rank in range(4)),) == counted


def write_truth(path: Path, rows: Sequence[tuple[str, ...]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(TRUTH_COLUMNS)
        writer.writerows(rows)


def test_predicted_against_measured(tmp_path: Path) -> None:
    rows = [
        ("a", "11", "10.1", "10", "12", "12.5"),
        ("b", "19", "20", "20", "30", "25"),
        ("out of memory", "200", "210", "", "220", ""),
        ("no simulation", "5.5", "", "5", "", "6"),
    ]
    write_truth(tmp_path / "truth.csv", rows)
    made = draw_truth(tmp_path / "truth.csv", tmp_path / "truth.svg")
    assert made["formula_gib"] == pytest.approx((3, (0.1 + 0.05 + 0.1) / 3, 0.1))
    assert made["simulated_gib"] == pytest.approx((2, 0.005, 0.01))
    assert made["simulated_reserved_gib"] == pytest.approx((2, (0.04 + 0.2) / 2, 0.2))
    words = text_of(tmp_path / "truth.svg")
    assert "3 rows, mean error 8.3%, worst 10.0%" in words
    assert errors(points([], "formula_gib", "measured_gib")).rows == 0


def test_mistakes_get_a_sentence(tmp_path: Path) -> None:
    spec = preset("tiny-llama")
    with pytest.raises(UserError, match=r"ends in '\.jpg'; name it \.png or \.svg"):
        draw_memory({"tiny": spec}, (64,), CARDS, tmp_path / "memory.jpg")
    (tmp_path / "x.png").mkdir()
    with pytest.raises(UserError, match="is a directory"):
        draw_memory({"tiny": spec}, (64,), CARDS, tmp_path / "x.png")
    with pytest.raises(UserError, match="no model to draw"):
        draw_memory({}, (64,), CARDS, tmp_path / "y.png")
    with pytest.raises(UserError, match="sequence_length is 100000, but the model has 256 positions"):
        draw_memory({"tiny": spec}, (100000,), CARDS, tmp_path / "y.png")
    with pytest.raises(UserError, match="nobody to split with"):
        draw_zero("tiny", spec, 1, (64,), CARDS, tmp_path / "y.png")
    with pytest.raises(UserError, match="there is no schedule 'fastest'; give one of gpipe"):
        checked(["1f1b", "fastest"])
    with pytest.raises(UserError, match="9 micro-batches are not a multiple of 4 ranks"):
        draw_pipeline(["interleaved"], 4, 9, tmp_path / "y.png")
    with pytest.raises(UserError, match="give 1 to 64"):
        draw_pipeline(["1f1b"], 4, 10**6, tmp_path / "y.png")
    with pytest.raises(UserError, match=r"cannot read .*absent\.csv"):
        draw_truth(tmp_path / "absent.csv", tmp_path / "y.png")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="has no rows with column formula_gib"):
        draw_truth(tmp_path / "other.csv", tmp_path / "y.png")
    assert not (tmp_path / "y.png").exists()


@pytest.mark.parametrize(("height", "place"), [(73, 79), (79, 79), (80, 80), (60, 60)])
def test_no_card_s_line_passes_through_the_label_of_a_bar(height: float, place: float) -> None:
    """A line at 79 on an axis up to 210, on which a label is some 10 high."""
    assert _clear_of(height, [79], 210) == place


def test_an_empty_bar_has_no_height() -> None:
    assert Bar("1 K", dict.fromkeys(COLORS, 0)).bytes == 0


def test_the_pages_figures_are_the_formulas() -> None:
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    spec = preset(LLAMA)
    eight = Workload(spec=spec, sequence_length=16384, global_batch=8)
    split = peaks(eight, Layout(micro_batch=1, data=8, zero=3), Levers(checkpoint_every=1)).gpu_bytes
    alone = Workload(spec=spec, sequence_length=4096, global_batch=1)
    whole = peaks(alone, Layout(micro_batch=1), Levers(checkpoint_every=1)).gpu_bytes
    assert f"{split / 2**30:.1f} GiB of an 80 GB card" in page
    assert f"{whole / 2**30:.1f} GiB on one" in page


@sampled(3)
@pytest.mark.parametrize("name", ["memory", "zero", "pipeline"])
def test_the_pages_commands_run_as_written(name: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    (command,) = re.findall(rf"^tightfit (picture {name} .*) --out {name}\.png$", page, flags=re.MULTILINE)
    made = CliRunner().invoke(app, [*shlex.split(command), "--out", str(tmp_path / "made.png")])
    assert made.exit_code == 0, made.output
    drawn, kept = (
        words_of(folder / each)
        for folder, each in ((tmp_path, "made.png"), (ROOT / "docs" / "pictures", f"{name}.png"))
    )
    assert drawn == kept, "draw docs/pictures anew"


def test_there_is_one_folder_of_pictures_and_one_format() -> None:
    places = {path.parent for page in (ROOT / "docs", ROOT / "benchmarks") for path in page.rglob("*.png")}
    assert places <= {ROOT / "docs" / "pictures", ROOT / "docs" / "images"}
    assert not list((ROOT / "docs").rglob("*.svg"))
