"""The whole loop: it learns, resumes bit-exactly, survives kills, and stops with a sentence when something is wrong."""

import gc
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.covering import sampled, thorough
from tests.distributed.group import PRELOADED
from tests.train.jobs import checkpoint_files, latest_checkpoint, run_and_die, tiny_job
from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.launch.forked import start_server
from tightfit.models.generate import Sampling, continue_text
from tightfit.models.loading import load_model
from tightfit.models.resolve import checkpoints_of
from tightfit.train import loop, stopping
from tightfit.train.loop import run_job
from tightfit.train.metrics import read_metrics
from tightfit.train.short_collections import short_collections
from tightfit.train.step import train_step

Make = Any
SMALL = {
    "model": {"source": "tiny-llama", "shape": {"layers": 2, "hidden_size": 32, "mlp_size": 48}},
    "evaluation": {"max_rows": 1},
    "global_batch": 2,
}
"""For many runs, and for those in bf16, where a matmul takes 200 times as long on a CPU."""


@pytest.fixture
def make(tmp_path: Path, corpus: Path, token_cache: Path) -> Make:
    def made(name: str = "run", **changes: Any) -> Job:
        return tiny_job(tmp_path / name, corpus, token_cache, **changes)

    return made


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Path:
    """Of two steps, made once; tests get copies."""
    job = tiny_job(tmp_path_factory.mktemp("a") / "run", corpus, token_cache, steps=2)
    run_job(job, quiet=True)
    return job.output


@pytest.fixture
def two_steps(a_run: Path, make: Make) -> Path:
    """The checkpoint of a copy, which stands where `make()` would run."""
    shutil.copytree(a_run, make().output)
    return make().output / "checkpoints" / "step-00000002"


def test_training_learns_and_leaves_a_whole_run(make: Make) -> None:
    job = make(
        steps=30,
        evaluation={"every": 10, "prompts": ["the quick"], "sample_tokens": 8, "temperature": 0},
        saving={"every": 10, "keep": 2},
        logging={"tensorboard": True},
    )
    result = run_job(job, quiet=True)
    assert result.start is not None
    assert result.end is not None
    assert result.end.loss < result.start.loss - 1
    assert result.start.loss == pytest.approx(math.log(320) + 0.5, abs=0.3)  # logits of variance one
    assert [path.name for path in checkpoints_of(job.output)] == ["step-00000020", "step-00000030"]
    rows = read_metrics(job.output / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 31))
    assert [row["step"] for row in rows if "held_out_loss" in row] == [0, 10, 20, 30]
    assert result.samples[0][0] == "the quick"
    assert len(result.samples[0][1]) > 0
    assert result.tokens_per_second > 0
    assert result.peak_bytes > 0
    assert list((job.output / "tensorboard").iterdir())


def test_settings_of_training_alone_are_not_saved(make: Make) -> None:
    """Neither the router's z-loss nor a capacity has a place in a config.json; a resumed run has them again."""
    model = {"source": "tiny-mixtral", "shape": {"layers": 1, "hidden_size": 32}}
    experts = {"z_loss": 0.01, "capacity_factor": 0.5}
    job = make(**SMALL | {"model": model, "experts": experts, "steps": 2, "saving": {"every": 1}})
    run_job(job, quiet=True, stop_after=1)
    assert run_job(job, quiet=True, resume=True).step == 2
    assert all(row["experts_dropped"] > 0 for row in read_metrics(job.output / "metrics.jsonl") if "loss" in row)


@sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "pure-bf16"])
def test_three_and_two_steps_equal_five(make: Make, precision: str) -> None:
    small = {"precision": precision, "layout": {"micro_batch": 1}} | SMALL
    whole, parts = make("whole", **small), make("parts", **small)
    straight = run_job(whole, quiet=True)
    first = run_job(parts, stop_after=3, quiet=True)
    assert first.checkpoint.name == "step-00000003"
    second = run_job(parts, resume=True, quiet=True)
    assert checkpoint_files(straight.checkpoint) == checkpoint_files(second.checkpoint)
    losses = [
        [row["loss"] for row in read_metrics(job.output / "metrics.jsonl") if "loss" in row] for job in (whole, parts)
    ]
    assert losses[0] == losses[1]
    assert second.end == straight.end
    assert second.start is not None
    assert straight.start is not None
    assert second.start.loss == straight.start.loss


@sampled(2)
@pytest.mark.parametrize(
    ("precision", "levers"),
    [
        ("fp16", {"optimizer_states": "8bit"}),
        ("fp32", {"optimizer_states": "factored"}),
        ("pure-bf16", {"optimizer_states": "fp32", "rounding": "stochastic"}),
        ("fp32", {"update_in_backward": True, "optimizer_states": "bf16"}),
    ],
)
def test_every_format_of_states_is_resumed_to_the_same_bytes(make: Make, precision: str, levers: Any) -> None:
    small = {"precision": precision, "layout": {"micro_batch": 2}} | SMALL
    whole, parts = (make(name, **small, levers=levers) for name in ("whole", "parts"))
    straight = run_job(whole, quiet=True)
    run_job(parts, stop_after=3, quiet=True)
    second = run_job(parts, resume=True, quiet=True)
    assert checkpoint_files(straight.checkpoint) == checkpoint_files(second.checkpoint)
    assert second.end == straight.end


def test_resume_in_the_middle_of_later_epochs(make: Make) -> None:
    large = {"steps": None, "epochs": 2.3, "global_batch": 16, "layout": {"micro_batch": 16}}
    whole, parts = (make(name, **SMALL | large) for name in ("whole", "parts"))
    straight = run_job(whole, quiet=True)
    for stop in (straight.steps // 3, straight.steps // 2, straight.steps):
        last = run_job(parts, resume="auto", stop_after=stop, quiet=True)
    assert straight.steps > 12
    assert checkpoint_files(straight.checkpoint) == checkpoint_files(last.checkpoint)


def test_fine_tuning_learns_the_answers_and_only_them(make: Make, tmp_path: Path, token_cache: Path) -> None:
    rows = [{"instruction": f"say {word}", "output": f"{word} it is"} for word in ("red", "green", "blue", "black") * 6]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": [str(chats)], "held_out": 0.1, "sequence_length": 64, "cache": str(token_cache)}
    job = make(objective="sft", data=data, steps=60, global_batch=2, optimizer={"lr": 5e-3})
    result = run_job(job, quiet=True)
    assert result.start is not None
    assert result.end is not None
    assert result.end.loss < 0.3 < result.start.loss
    counted = [row["tokens"] for row in read_metrics(job.output / "metrics.jsonl") if "loss" in row]
    assert all(0 < tokens < 2 * 64 for tokens in counted)
    loaded = load_model(str(job.output))
    answer = "".join(continue_text(loaded, "say green", Sampling(temperature=0, max_tokens=12), chat=True)[0])
    assert answer == "green it is"


def test_accumulation_and_checkpointing_give_the_same_training(make: Make) -> None:
    big = run_job(make("big", layout={"micro_batch": 4}), quiet=True)
    cut = run_job(make("cut", layout={"micro_batch": 1}, levers={"checkpoint_every": 1}), quiet=True)
    a, b = (load_file(result.checkpoint / "model.safetensors") for result in (big, cut))
    for name, tensor in a.items():  # as wholes: Adam makes a step of any gradient that is not exactly zero
        assert torch.linalg.vector_norm(tensor - b[name]) < 3e-5 * torch.linalg.vector_norm(tensor), name


@pytest.mark.parametrize("wanted", [6, thorough(20)])
def test_sigkill_at_any_instant_leaves_a_loadable_run(make: Make, wanted: int) -> None:
    """Kills at random instants of the three steps after a save; with a save after every step most of them fall
    into saving. One that has ended before it was killed does not count."""
    job, straight = (make(name, steps=40, saving={"every": 1, "keep": 2}, **SMALL) for name in ("killed", "straight"))
    began = time.monotonic()
    expected = checkpoint_files(run_job(straight, quiet=True).checkpoint)
    step_s = (time.monotonic() - began) / 40
    start_server(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    chance = random.Random(7)
    fields, kills, reached = job.model_dump(mode="json"), 0, 0
    while kills < wanted:
        newest = latest_checkpoint(job.output)
        process = context.Process(target=run_and_die, args=(fields, newest is not None))
        process.start()
        _wait_for_progress(job.output, newest, process)
        time.sleep(chance.uniform(0, 3 * step_s))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        kills += process.exitcode == -signal.SIGKILL
        found = latest_checkpoint(job.output)
        assert found is not None
        assert load_model(str(job.output)).source
        assert int(found.name.removeprefix("step-")) >= reached
        reached = int(found.name.removeprefix("step-"))
        if reached == 40:
            run_job(job, overwrite=True, stop_after=1, quiet=True)
            reached = 1
    final = run_job(job, resume=True, quiet=True)
    assert checkpoint_files(final.checkpoint) == expected
    assert [row["step"] for row in read_metrics(job.output / "metrics.jsonl") if "loss" in row] == list(range(1, 41))
    assert not [path for path in (job.output / "checkpoints").iterdir() if path.name.startswith(".")]


def _wait_for_progress(run: Path, began: Path | None, process: Any) -> None:
    """Until the process has saved something of its own (or ended)."""
    folder, deadline = run / "checkpoints", time.monotonic() + 60
    while process.is_alive() and time.monotonic() < deadline:
        newest = max((p.name for p in folder.glob("step-*")), default="") if folder.is_dir() else ""
        if newest > (began.name if began is not None else ""):
            return
        time.sleep(0.002)


def test_termination_request_saves_and_stops(make: Make) -> None:
    """Asked twice in a moment, as by Slurm and by who started it, it is asked once."""
    job = make(steps=100_000)

    def once_training() -> None:
        while len(read_metrics(job.output / "metrics.jsonl")) < 4:
            time.sleep(0.01)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.002)

    timer = threading.Thread(target=once_training)
    timer.start()
    result = run_job(job, quiet=True)
    timer.join()
    assert result.stopped_by == signal.SIGTERM
    assert 0 < result.step < 100_000
    assert result.checkpoint.name == f"step-{result.step:08d}"
    assert result.checkpoint.is_dir()


def test_a_second_request_stops_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "SAME_REQUEST_S", 0.0)

    def ask_twice(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(loop, "train_step", ask_twice)
    with pytest.raises(KeyboardInterrupt):
        run_job(make(steps=100_000), quiet=True)


def test_collections_are_short_while_steps_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before the first step is not looked at by the garbage collector; after the last it is again."""
    set_aside: list[int] = []

    def look(*given: Any, **named: Any) -> Any:
        set_aside.append(gc.get_freeze_count())
        return train_step(*given, **named)

    monkeypatch.setattr(loop, "train_step", look)
    monkeypatch.setattr(loop, "short_collections", short_collections)
    gc.unfreeze()
    there = len(gc.get_objects())
    try:
        run_job(make(steps=2), quiet=True)
        assert min(set_aside) > there / 2
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()  # as it was (tests/conftest.py)


def test_nan_loss_names_the_step_and_keeps_the_last_good_checkpoint(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(steps=10, saving={"every": 2, "keep": 3})
    calls: list[int] = []

    def poisoned(model: Any, *rest: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            with torch.no_grad():
                model.norm.weight.fill_(float("nan"))
        return train_step(model, *rest, **named)

    monkeypatch.setattr(loop, "train_step", poisoned)
    with pytest.raises(UserError) as caught:
        run_job(job, quiet=True)
    assert "step 6" in str(caught.value)
    assert "nan" in str(caught.value)
    assert "step-00000004" in str(caught.value)
    assert "optimizer.lr" in str(caught.value)
    weights = load_file(checkpoints_of(job.output)[-1] / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    monkeypatch.undo()
    assert run_job(job, resume=True, quiet=True).step == 10


CONTRADICTIONS = [
    ({"seed": 9}, "seed"),
    ({"global_batch": 8}, "global_batch"),
    ({"precision": "bf16"}, "precision"),
    ({"model": {"source": "tiny-qwen2"}}, "model"),
    ({"tokenizer": {"source": "train", "vocab_size": 300}}, "tokenizer"),
    ({"levers": {"optimizer_states": "8bit"}}, r"set levers\.optimizer_states back"),
]


@pytest.mark.parametrize(("change", "word"), CONTRADICTIONS, ids=[word for _, word in CONTRADICTIONS])
def test_a_resume_that_contradicts_its_checkpoint_is_refused(
    make: Make, two_steps: Path, change: dict[str, Any], word: str
) -> None:
    before = checkpoint_files(two_steps)
    with pytest.raises(UserError, match=word) as caught:
        run_job(make(**{"steps": 4, **change}), resume=True, quiet=True)
    assert "step-00000002" in str(caught.value)
    assert checkpoint_files(two_steps) == before


def test_changed_data_is_refused_on_resume(make: Make, tmp_path: Path, token_cache: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten " * 60)
    data = {"train": [str(text)], "held_out": 0.1, "sequence_length": 16, "cache": str(token_cache)}
    run_job(make(steps=2, data=data), quiet=True)
    text.write_text("ten nine eight seven six five four three two one " * 60)
    with pytest.raises(UserError, match="data"):
        run_job(make(steps=4, data=data), resume=True, quiet=True)


def test_more_steps_and_another_rate_may_be_asked_of_a_resume(make: Make) -> None:
    run_job(make(steps=2), quiet=True)
    result = run_job(make(steps=4, optimizer={"lr": 1e-3}, layout={"micro_batch": 1}), resume=True, quiet=True)
    assert result.step == 4


def test_a_finished_run_resumes_to_nothing(make: Make) -> None:
    first = run_job(make(steps=2), quiet=True)
    before = checkpoint_files(first.checkpoint)
    again = run_job(make(steps=2), resume=True, quiet=True)
    assert again.step == 2
    assert checkpoint_files(again.checkpoint) == before


def test_an_existing_run_needs_a_decision(make: Make) -> None:
    run_job(make(steps=2), quiet=True)
    with pytest.raises(UserError, match="--resume"):
        run_job(make(steps=2), quiet=True)
    assert run_job(make(steps=3), overwrite=True, quiet=True).step == 3
    names = [path.name for path in checkpoints_of(make().output)]
    assert names == ["step-00000003"]


def test_a_full_disk_gets_a_sentence_and_nothing_half_written(make: Make) -> None:
    job = make(steps=4, saving={"every": 2, "keep": 5})
    run_job(job, stop_after=2, quiet=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError) as caught:
            run_job(job, resume=True, quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot write checkpoint" in str(caught.value)
    assert "step-00000002" in str(caught.value)
    assert [path.name for path in (job.output / "checkpoints").iterdir()] == ["step-00000002"]


def test_an_output_that_cannot_be_written(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write output"):
        run_job(make("file/run"), quiet=True)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("training/state.json", "truncate"),
        ("training/state.json", "garbage"),
        ("training/state.safetensors", "truncate"),
        ("training/state.safetensors", "garbage"),
        ("model.safetensors", "truncate"),
        ("model.safetensors", "garbage"),
        ("config.json", "truncate"),
        ("tokenizer.json", "truncate"),
    ],
)
def test_damaged_checkpoints_get_a_sentence(make: Make, two_steps: Path, name: str, damage: str) -> None:
    path = two_steps / name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage == "truncate" else os.urandom(64) + content[64:])
    with pytest.raises(UserError) as caught:
        run_job(make(steps=4), resume=True, quiet=True)
    assert Path(name).stem in str(caught.value)


STATES = {
    "no object": ("[]", "damaged"),
    "a step that is none": ({"step": None}, "step is None"),
    "a step that is true": ({"step": True}, "step is True"),
    "another step": ({"step": 3}, "it is of step 3, and its directory is step-00000002"),
    "no loader": ({"loader": None}, "loader is not an object"),
    "an empty loader": ({"loader": {}}, "position in the data cannot be used"),
    "a loader of words": ({"loader": {"_snapshot": "x", "batch_sampler": []}}, "position in the data cannot be used"),
    "a loss scale of words": ({"loss_scale": {"value": "x"}}, "loss_scale has a factor that is none"),
    "a loss scale of nothing known": ({"loss_scale": {"wheels": 3}}, "wheels"),
    "a loss scale without end": ({"loss_scale": {"value": 1e999}}, "loss_scale has a factor that is none"),
    "facts that are none": ({"facts": 3}, "facts is not an object"),
    "facts that say nothing": ({"facts": {}}, "precision"),
    "more facts": ({"facts": "more"}, "made with wheels 4"),
    "a job that is none": ({"job": {"model": 3}}, "was made with"),
}


@pytest.mark.parametrize(("change", "words"), STATES.values(), ids=STATES)
def test_a_training_state_that_cannot_be_is_refused(make: Make, two_steps: Path, change: Any, words: str) -> None:
    path = two_steps / "training" / "state.json"
    content = json.loads(path.read_text())
    if change == {"facts": "more"}:
        change = {"facts": {**content["facts"], "wheels": 4}}
    path.write_text(json.dumps({**content, **change}) if isinstance(change, dict) else change)
    with pytest.raises(UserError) as caught:
        run_job(make(steps=4), resume=True, quiet=True)
    assert words in str(caught.value)


def test_damaged_metrics_do_not_keep_a_run_from_going_on(make: Make, two_steps: Path) -> None:
    path = make().output / "metrics.jsonl"
    rows = [
        b"\xff\xfe",
        b'{"step": null}',
        b'{"step": "1"}',
        b"[]",
        b'{"step": 0, "held_out_loss": "x"}',
        b"{" * 50_000,
    ]
    path.write_bytes(b"\n".join(rows) + b"\n" + path.read_bytes())
    assert run_job(make(steps=4), resume=True, quiet=True).step == 4
    steps = [row["step"] for row in read_metrics(path) if "loss" in row]
    assert steps == [1, 2, 3, 4]


def test_metrics_rows_beyond_the_checkpoint_are_dropped_on_resume(make: Make) -> None:
    job = make(steps=6, saving={"every": 2})
    run_job(job, stop_after=4, quiet=True)
    with (job.output / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "loss": 99.0}) + "\n" + '{"step": 6, "lo')
    run_job(job, resume=True, quiet=True)
    rows = [row for row in read_metrics(job.output / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["loss"] < 99 for row in rows)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"source": "tiny-lama"}}, ["tiny-lama", "tiny-llama"]),
        (
            {"model": {"source": "tiny-llama", "weights": "pretrained"}, "tokenizer": "model"},
            ["pretrained", "tiny-llama"],
        ),
        ({"model": {"source": "tiny-llama", "shape": {"wheels": 4}}}, ["wheels"]),
        ({"model": {"source": "tiny-llama", "shape": {"heads": 3}}}, ["3"]),
        ({"model": {"source": "tiny-llama", "shape": {"rope": 3}}}, ["rope"]),
        ({"model": {"source": "tiny-llama", "shape": {"tied": 3}}}, ["tied", "true or false"]),
        ({"tokenizer": {"source": "model"}}, ["tiny-llama", "tokenizer"]),
        ({"tokenizer": {"source": "/nowhere"}}, ["/nowhere"]),
    ],
)
def test_bad_jobs_get_a_sentence_before_anything_starts(make: Make, change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        run_job(make(**change), quiet=True)
    assert all(word in str(caught.value) for word in words)


def test_rows_longer_than_the_positions_are_refused(make: Make, corpus: Path, token_cache: Path) -> None:
    data = {"train": [str(corpus)], "sequence_length": 10_000, "cache": str(token_cache)}
    with pytest.raises(UserError, match=r"10000.*positions"):
        run_job(make(data=data), quiet=True)


def test_prompts_longer_than_the_positions_are_refused_before_the_run(make: Make) -> None:
    job = make(evaluation={"prompts": ["short", "long " * 500]})
    with pytest.raises(UserError, match=r"prompt is \d+ tokens long and the model has 256 positions; shorten it"):
        run_job(job, quiet=True)
    assert not job.output.exists()


def test_a_tokenizer_larger_than_the_model_is_refused(make: Make, tmp_path: Path) -> None:
    first = run_job(make("first", steps=1), quiet=True)
    small = {"source": "tiny-llama", "shape": {"vocab_size": 300}}
    with pytest.raises(UserError, match=r"300"):
        run_job(make("second", model=small, tokenizer={"source": str(first.checkpoint)}), quiet=True)
