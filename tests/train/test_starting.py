"""Starts: what is refused leaves every file as it was, and a run goes on wherever it is."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tests.covering import sampled
from tests.train.jobs import checkpoint_files, snapshot
from tightfit.cli import main as cli
from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.jobs.paths import absolute, with_absolute_paths
from tightfit.models.resolve import checkpoints_of
from tightfit.plan.job import read_job
from tightfit.train.checkpoints import room
from tightfit.train.loop import run_job
from tightfit.train.metrics import read_metrics


def tightfit(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Any:
    monkeypatch.setattr("sys.argv", ["tightfit", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


WRONG: dict[str, dict[str, Any]] = {
    "unknown model": {"model": {"source": "tiny-lama"}},
    "model that is not there": {"model": {"source": "TMP/nowhere"}},
    "directory without a model": {"model": {"source": "TMP/empty"}},
    "damaged config": {"model": {"source": "TMP/damaged"}},
    "pretrained preset": {"model": {"source": "tiny-llama", "weights": "pretrained"}, "tokenizer": "model"},
    "unknown shape": {"model": {"source": "tiny-llama", "shape": {"wheels": 4}}},
    "heads that do not divide": {"model": {"source": "tiny-llama", "shape": {"heads": 3}}},
    "shape that no config.json can say": {"model": {"source": "tiny-gpt2", "shape": {"qkv_bias": 0}}},
    "preset without a tokenizer": {"tokenizer": {"source": "model"}},
    "tokenizer that is not there": {"tokenizer": {"source": "TMP/nowhere"}},
    "directory without a tokenizer": {"tokenizer": {"source": "TMP/empty"}},
    "data that is not there": {"data": {"train": ["TMP/absent.txt"]}},
    "empty directory of data": {"data": {"train": ["TMP/empty"]}},
    "empty file": {"data": {"train": ["TMP/empty.txt"]}},
    "not UTF-8": {"data": {"train": ["TMP/latin.txt"]}},
    "unsupported file": {"data": {"train": ["TMP/picture.png"]}},
    "no such field": {"data": {"train": ["TMP/rows.jsonl"], "field": "body"}},
    "broken rows": {"data": {"train": ["TMP/broken.jsonl"]}},
    "text for conversations": {"objective": "sft", "data": {"train": ["TMP/text.txt"]}},
    "rows without answers": {"objective": "sft", "data": {"train": ["TMP/rows.jsonl"]}},
    "one word": {"data": {"train": ["TMP/word.txt"], "held_out": 0.1}},
    "held-out data that is not there": {"data": {"train": ["TMP/text.txt"], "held_out": ["TMP/absent.txt"]}},
    "rows longer than the positions": {"data": {"train": ["TMP/text.txt"], "sequence_length": 100_000}},
    "warm-up longer than the run": {"steps": None, "epochs": 0.01, "schedule": {"warmup_steps": 90}},
    "layout without its processes": {"layout": {"data": 2, "micro_batch": 1}},
    "output below a file": {"output": "TMP/text.txt/run"},
    "output that is a file": {"output": "TMP/text.txt"},
    "output with a file of the user's": {"output": "TMP/mine"},
    "cuda on a machine without": {"device": "cuda"},
}


@sampled(3)
@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_what_cannot_start_changes_no_file(
    make_small: Callable[..., Job], run_copy: Path, tmp_path: Path, fields: dict[str, Any], overwrite: bool
) -> None:
    _material(tmp_path)
    changes = yaml.safe_load(yaml.safe_dump(fields).replace("TMP", str(tmp_path)))
    if fields.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    place = changes.pop("output", str(run_copy if overwrite else tmp_path / "deep" / "er" / "new"))
    before = snapshot(tmp_path)
    base = make_small("other").model_dump(mode="json")
    is_data = "data" in changes
    data = {**base["data"], **changes.pop("data", {})}
    data["cache"] = str(tmp_path.parent / f"{tmp_path.name}-cache") if is_data else data["cache"]
    with pytest.raises(UserError):
        run_job(Job.model_validate({**base, "data": data, "output": place, **changes}), overwrite=overwrite, quiet=True)
    assert snapshot(tmp_path) == before
    half_made = [lock for lock in Path(data["cache"]).glob("*/lock") if not (lock.parent / "store").is_dir()]
    assert not (is_data and half_made), "nor anything in the cache but what is whole"


def _material(folder: Path) -> None:
    for name in ("empty", "mine", "damaged"):
        (folder / name).mkdir()
    texts = {"text.txt": "some words to train on\n" * 40, "word.txt": "a", "empty.txt": "", "picture.png": "x"}
    texts |= {"rows.jsonl": '{"text": "a few words"}\n', "broken.jsonl": '{"text": ', "damaged/config.json": "{"}
    texts |= {"mine/metrics.jsonl": "mine"}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))


def test_a_disk_without_room_is_found_before_anything_is_written(
    make_small: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[int] = []
    real = room.checkpoint_bytes

    def counted(*given: Any, **named: Any) -> int:
        needed.append(real(*given, **named))
        return needed[-1]

    monkeypatch.setattr(room, "checkpoint_bytes", counted)
    job = make_small(saving={"every": 1, "keep": 1}, steps=5)
    run_job(make_small("first", saving={"every": 1, "keep": 1}, steps=5), quiet=True)
    real_size = sum(p.stat().st_size for p in checkpoints_of(tmp_path / "first")[-1].rglob("*.safetensors"))
    assert needed[0] == pytest.approx(real_size, rel=0.1)
    before = snapshot(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * needed[0] - 1))
    with pytest.raises(UserError, match=r" MiB free, but 2 checkpoints of .* MiB each .* lower saving\.keep"):
        run_job(job, quiet=True)
    assert snapshot(tmp_path) == before
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * needed[0]))
    assert run_job(job, quiet=True).step == 5


@pytest.mark.parametrize(
    ("flags", "why"), [(0, "no permission to write"), (os.ST_RDONLY, "the disk of .* is read-only")]
)
def test_a_run_that_cannot_be_written_to_is_refused_first(
    make_small: Callable[..., Job], run_copy: Path, monkeypatch: pytest.MonkeyPatch, flags: int, why: str
) -> None:
    """Resumed, begun anew, or beside it; as root everything is writable, so the system's answer is replaced."""
    before = snapshot(run_copy.parent)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda *_: SimpleNamespace(f_flag=flags))
    for start in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(UserError, match=f"cannot write output {run_copy}: {why}.*; choose a writable directory"):
            run_job(make_small(steps=4), quiet=True, **start)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=why):
        run_job(make_small("beside", steps=4), quiet=True)
    assert snapshot(run_copy.parent) == before


def test_a_refused_resume_leaves_the_run_resumable(make_small: Callable[..., Job], run_copy: Path) -> None:
    before = snapshot(run_copy)
    for change in ({"seed": 9}, {"global_batch": 4}, {"steps": 1}, {"data": {"train": ["/nowhere.txt"]}}):
        with pytest.raises(UserError):
            run_job(make_small(**{"steps": 4, **change}), resume=True, quiet=True)
        assert snapshot(run_copy) == before, change
    assert run_job(make_small(steps=3), resume=True, quiet=True).step == 3


def test_a_job_file_of_the_user_s_is_never_replaced(
    make_small: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fields = make_small().model_dump(mode="json") | {"output": "."}
    text = "# mine\n" + yaml.safe_dump(fields)
    (tmp_path / "job.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    for options in ([], ["--overwrite"], ["--resume=auto"]):
        assert tightfit(monkeypatch, "train", "job.yaml", *options) == 2
        assert "was not written by a run" in capfd.readouterr().err
    assert snapshot(tmp_path).keys() == {"job.yaml"}
    assert (tmp_path / "job.yaml").read_text() == text


def test_a_run_that_was_moved_goes_on_where_it_is(
    run_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path
) -> None:
    run_copy.rename(tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert tightfit(monkeypatch, "train", "../moved", "--resume", "-o", "steps=3", "--json") == 0
    assert [path.name for path in checkpoints_of(tmp_path / "moved")][-1] == "step-00000003"
    assert not run_copy.exists()
    assert read_job(tmp_path / "moved")[0].output == tmp_path / "moved"
    assert read_job(tmp_path / "moved" / "job.yaml")[0].output == tmp_path / "moved"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_names_are_looked_up_here_and_beside_the_job_file(
    make_small: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "here").mkdir()
    for name in ("project/notes.txt", "project/both.txt", "here/both.txt"):
        (tmp_path / name).write_text("text")
    fields = make_small().model_dump(mode="json") | {"output": "runs/a"}
    fields["data"] |= {"train": ["notes.txt", "both.txt", "absent.txt", "stdlib"], "held_out": 0.1}
    (tmp_path / "project" / "job.yaml").write_text(yaml.safe_dump(fields))
    monkeypatch.chdir(tmp_path / "here")
    job, _ = read_job(Path("../project/job.yaml"))
    assert job.data.train == [
        str(tmp_path / "project/notes.txt"),
        str(tmp_path / "here/both.txt"),
        "absent.txt",
        "stdlib",
    ]
    assert job.output == tmp_path / "here" / "runs" / "a"
    (tmp_path / "link").symlink_to(tmp_path / "project")
    monkeypatch.chdir(tmp_path / "link")  # whose `..` is not what its name says
    assert Path(absolute(Path("../here/both.txt"))).samefile(tmp_path / "here/both.txt")
    assert with_absolute_paths(job) == job


def test_resume_without_a_checkpoint_is_refused_unless_auto(
    make_small: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(make_small().model_dump(mode="json")))
    before = snapshot(tmp_path)
    assert tightfit(monkeypatch, "train", file, "--resume") == 2
    assert "has no checkpoint to resume from; --resume=auto begins anew" in capfd.readouterr().err
    assert snapshot(tmp_path) == before
    for steps in (2, 3):  # begins, then goes on
        assert tightfit(monkeypatch, "train", file, "--resume=auto", "-o", f"steps={steps}", "--json") == 0
    assert json.loads(capfd.readouterr().out.split("\n}\n")[1] + "}")["step"] == 3
    assert [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in row] == [1, 2, 3]


def test_a_checkpoint_may_be_chosen_and_later_ones_are_kept_aside(
    make_small: Callable[..., Job], run_copy: Path
) -> None:
    later = checkpoint_files(run_copy / "checkpoints/step-00000002")
    with pytest.raises(UserError, match="no checkpoint step-00000007; there are step-00000001, step-00000002"):
        run_job(make_small(), checkpoint="step-00000007", quiet=True)
    again = run_job(make_small(), checkpoint="step-00000001", quiet=True)
    assert again.step == 2
    (aside,) = run_copy.glob("aside-*/step-00000002")
    assert checkpoint_files(aside) == later == checkpoint_files(again.checkpoint)


def test_contradictory_requests_are_refused(make_small: Callable[..., Job], run_copy: Path) -> None:
    before = snapshot(run_copy)
    with pytest.raises(UserError, match="give one of the two"):
        run_job(make_small(), resume=True, overwrite=True, quiet=True)
    with pytest.raises(UserError, match="has 2 steps, more than the 1 of this job"):
        run_job(make_small(steps=1), resume=True, quiet=True)
    with pytest.raises(UserError, match=r"--stop-after is 1, but .* has 2 steps already"):
        run_job(make_small(steps=9), resume=True, stop_after=1, quiet=True)
    assert snapshot(run_copy) == before


def test_a_finished_run_says_so_and_stays(
    make_small: Callable[..., Job], run_copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(run_copy)
    assert run_job(make_small(), resume=True).step == 2
    assert "is finished: 2 of 2 steps; give -o steps=MORE" in " ".join(capfd.readouterr().err.split())
    assert snapshot(run_copy) == before


def test_a_finished_run_of_epochs_is_trained_further_as_it_says(
    make_small: Callable[..., Job], capfd: pytest.CaptureFixture[str]
) -> None:
    fields = {"steps": None, "epochs": 0.05}
    first = run_job(make_small(**fields), quiet=True)
    run_job(make_small(**fields), resume=True)
    assert "give -o epochs=MORE to train it further" in " ".join(capfd.readouterr().err.split())
    assert run_job(make_small(**{**fields, "epochs": 0.1}), resume=True, quiet=True).step > first.step


def conversations(folder: Path, long: int, short: int) -> Path:
    """Answers of some 60 tokens, and of one."""
    words = ["the quick brown fox jumps over the lazy dog " * 6] * long + ["yes"] * short
    rows = [{"instruction": "say it", "output": answer} for answer in words]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "chats.jsonl"


def test_conversations_that_do_not_fit_are_told_of_and_mostly_lost_ones_refused(
    make_small: Callable[..., Job], tmp_path: Path, token_cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def job(name: str, long: int, short: int, length: int) -> Job:
        data = {"train": [str(conversations(tmp_path, long, short))], "held_out": 0, "sequence_length": length}
        return make_small(name, objective="sft", data={**data, "cache": str(token_cache)}, steps=1)

    run_job(job("told", 1, 300, 32))
    said = " ".join(capfd.readouterr().err.split())
    assert "warning: 1 of 301 conversations are longer than data.sequence_length 32: 1 are cut and 0 left out" in said
    with pytest.raises(UserError, match=r"2\d of 21 conversations .* loses \d+\.\d% of the answers' tokens; raise"):
        run_job(job("refused", 20, 1, 16), quiet=True)
    assert not (tmp_path / "refused").exists()
    run_job(job("fits", 3, 3, 128))
    assert "longer than" not in capfd.readouterr().err


@pytest.mark.parametrize("field", ["model: ~nosuchuser/m\ndata: d", "model: tiny-llama\ndata: ~nosuchuser/x"])
def test_nobody_s_home_is_a_sentence(field: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"{field}\noutput: o\nsteps: 1\n")
    with pytest.raises(UserError, match=r"'~nosuchuser/\w' begins with a home directory that does not exist"):
        read_job(tmp_path / "job.yaml", [])
