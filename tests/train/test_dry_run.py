"""`--dry-run`: what would run on how many ranks, or the sentence of the run itself; nothing is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from tests.train.jobs import snapshot
from tightfit.cli import main as cli
from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.report.dry_run import print_dry_run
from tightfit.train.dry_run import DryRun, dry_run
from tightfit.train.loop import run_job


def say(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *words: object) -> tuple[Any, str, str]:
    monkeypatch.setattr("sys.argv", ["tightfit", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code, *capfd.readouterr()


@pytest.mark.parametrize("verb", ["train", "launch"])
def test_a_job_for_eight_gpus_is_told_on_any_machine(
    make_small: Callable[..., Job],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    verb: str,
) -> None:
    layout = {"data": 4, "zero": 3, "tensor": 2, "micro_batch": 1}
    vocabulary = {"source": "train", "vocab_size": 300 + len(verb)}  # which no other test has trained
    job = make_small(
        tokenizer=vocabulary,
        layout=layout,
        global_batch=8,
        device="cuda",
        precision="auto",
        levers={"checkpoint_every": 1},
    )
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json")))
    before = snapshot(tmp_path)
    code, out, _ = say(monkeypatch, capfd, verb, tmp_path / "job.yaml", "--dry-run")
    assert code == 0
    assert "" not in out.splitlines()  # a bar of the tokenizers library would leave lines in a pipe
    for words in ("8 ranks on cuda: data 4 (ZeRO-3) × tensor 2", "0 to 2", "bf16", "checkpoint every layer", "256"):
        assert words in out, out
    assert f"anew in {tmp_path / 'run'}" in out
    assert "a GPU in bf16, predicted; `tightfit plan` says on which cards it fits" in out
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("room", "said"), [(2**40, "; this one has 1024.00 GiB"), (2**20, "more than this one's 1 MiB")]
)
def test_memory_is_beside_that_of_this_gpu(
    room: int, said: str, make_small: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(DryRun, "room_bytes", room)
    print_dry_run(dry_run(make_small(), quiet=True), as_json=False)
    assert said in capsys.readouterr().out


def test_it_tells_what_the_run_then_does(
    make_small: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job = make_small(steps=None, epochs=0.1)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json")))
    code, out, _ = say(monkeypatch, capfd, "train", tmp_path / "job.yaml", "--dry-run", "--json")
    told = json.loads(out)
    assert code == 0
    result = run_job(job, quiet=True)
    assert (told["steps"], told["params"], told["precision"]) == (result.steps, result.params, result.precision)
    stays = sum(file.stat().st_size for file in result.checkpoint.rglob("*.safetensors"))
    assert told["checkpoint_bytes"] == pytest.approx(stays, rel=0.1)
    _, planned, _ = say(monkeypatch, capfd, "plan", tmp_path / "job.yaml", "--on", "T4", "--json")
    assert told["gpu_peak_bytes"] == json.loads(planned)["gpu_peak_bytes"]
    assert dry_run(job, resume=True, quiet=True).checked.is_finished
    assert "whose run it replaces" in dry_run(job, overwrite=True, quiet=True).begins


def test_it_refuses_as_the_run_does(make_small: Callable[..., Job], run_copy: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    for changes, options in (
        ({}, {}),
        ({"seed": 4}, {"resume": True}),
        ({"model": {"source": "tiny-lama"}}, {"overwrite": True}),
        ({"data": {"train": ["/nowhere.txt"]}}, {"overwrite": True}),
        ({"steps": 1}, {"resume": True}),
    ):
        job = make_small(**{"steps": 4, **changes})
        sentences = []
        for function in (cast(Any, dry_run), cast(Any, run_job)):
            with pytest.raises(UserError) as told:
                function(job, quiet=True, **options)
            sentences.append(str(told.value))
        assert sentences[0] == sentences[1]
    assert snapshot(tmp_path) == before


def test_a_model_that_a_layout_cannot_divide_is_refused(make_small: Callable[..., Job]) -> None:
    with pytest.raises(UserError, match="3"):
        dry_run(make_small(layout={"tensor": 3, "micro_batch": 1}), quiet=True)
