"""Outputs of verbs: files that tightfit did not write are left alone, its own are written again."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.train.jobs import SMALL_RUN, tiny_job
from tightfit.cli import main as cli
from tightfit.hardware import cpu
from tightfit.models.loading import load_model
from tightfit.train import precision
from tightfit.train.inference_precision import inference_dtype
from tightfit.train.loop import run_job

Say = Callable[..., tuple[Any, str]]
DRAW = ["picture", "pipeline", "--ranks", "2", "--micro-batches", "2", "--schedule", "gpipe"]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Say:
    def said(*words: object) -> tuple[Any, str]:
        monkeypatch.setattr("sys.argv", ["tightfit", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        shown = capfd.readouterr()
        return stopped.value.code, shown.err + shown.out

    return said


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([*DRAW, "--out"], "a.png"),
        ([*DRAW, "--out"], "a.svg"),
        (["plan", "tiny-llama", "--on", "H100-80GB", "--save"], "plan.json"),
    ],
)
def test_what_is_not_ours_is_not_overwritten(say: Say, tmp_path: Path, words: list[str], name: str) -> None:
    place = tmp_path / name
    place.write_text('{"mine": 1}')
    code, told = say(*words, place)
    assert code == 2
    assert str(place) in told
    assert "is not a" in told or "exists and is not" in told
    assert place.read_text() == '{"mine": 1}'
    place.unlink()
    for _ in range(2):  # made, then made again over our own
        assert say(*words, place)[0] == 0
        assert place.stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "name"),
    [([*DRAW, "--out"], "a.png"), (["plan", "tiny-llama", "--on", "H100-80GB", "--save"], "plan.json")],
)
def test_an_output_that_is_a_link_is_written_where_it_leads(
    say: Say, tmp_path: Path, words: list[str], name: str
) -> None:
    (tmp_path / "shared").mkdir()
    link = tmp_path / name
    link.symlink_to(Path("shared") / name)
    for _ in range(2):  # made, then made again over our own
        assert say(*words, link)[0] == 0
    assert link.is_symlink()
    assert (tmp_path / "shared" / name).stat().st_size > 1000
    (tmp_path / "shared" / name).write_text('{"mine": 1}')
    assert say(*words, link)[0] == 2
    assert (tmp_path / "shared" / name).read_text() == '{"mine": 1}'


@pytest.mark.parametrize(
    "words",
    [
        [*DRAW, "--out", "pipe.png"],
        ["plan", "tiny-llama", "--on", "H100-80GB", "--save", "pipe.json"],
        ["serve", "tiny-llama", "--export", "vllm", "--on", "T4", "--weights", "x", "--out", "pipe.sh"],
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_told_and_stays(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Reading it, to see whether it is ours, would never end."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo(words[-1])
    code, told = say(*words)
    assert code == 2
    assert words[-1] in told
    assert Path(words[-1]).is_fifo()


def test_measure_leaves_a_user_s_ledger_alone(say: Say, tmp_path: Path, corpus: Path, token_cache: Path) -> None:
    job = tiny_job(tmp_path / "run", corpus, token_cache, **SMALL_RUN)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json")))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger.json").write_text("[1, 2]")
    code, told = say("measure", tmp_path / "job.yaml", "--steps", 1)
    assert code == 2
    assert "ledger.json exists and is not a ledger that tightfit wrote" in told
    (tmp_path / "run" / "ledger.json").unlink()
    assert [say("measure", tmp_path / "job.yaml", "--steps", 1)[0] for _ in range(2)] == [0, 0]


def test_a_float32_model_is_evaluated_in_float32_whatever_the_processor(
    say: Say, tmp_path: Path, corpus: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers; on this processor as on one with bf16 instructions."""
    monkeypatch.setattr(precision, "faster_on_cpu", lambda: "bf16")
    monkeypatch.setattr(cpu, "has_native_bf16", lambda: True)
    run = run_job(tiny_job(tmp_path / "run", corpus, token_cache, **SMALL_RUN), quiet=True)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog")
    common = ("evaluate", run.run, "--data", text, "--cache", token_cache, "--json")
    loss = loss_of(say(*common)[1])
    model = AutoModelForCausalLM.from_pretrained(run.checkpoint, dtype=torch.float32)
    tokenizer = load_model(str(run.run)).tokenizer
    assert tokenizer is not None
    ids = torch.tensor([[*tokenizer.encode(text.read_text()), tokenizer.eos_id]])
    truth = model(ids, labels=ids).loss.item()
    assert loss == pytest.approx(truth, rel=1e-5)
    rounded = loss_of(say(*common, "--precision", "bf16")[1])
    assert rounded != loss
    assert rounded == pytest.approx(truth, rel=1e-2)


def loss_of(said: str) -> float:
    """Of the JSON among what was said."""
    return float(json.loads(said[said.index("{") :])["loss"])


def test_the_stored_format_is_read_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    found = [inference_dtype(str(tmp_path), "auto", torch.device(kind)) for kind in ("cuda", "cpu")]
    assert found == [torch.bfloat16, torch.float32]
    assert inference_dtype(str(tmp_path), "fp16", torch.device("cpu")) == torch.float16
    (tmp_path / "config.json").write_text('{"torch_dtype": "float32"}')
    assert inference_dtype(str(tmp_path), "auto", torch.device("cuda")) == torch.float32
    assert inference_dtype("model.gguf", "auto", torch.device("cuda")) == torch.float32
