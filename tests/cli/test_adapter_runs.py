"""A run of adapters over a packed model is a model to every command: each says what the sum of both says, expanded."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve.test_process import ask, serving
from tests.train.jobs import tiny_job
from tests.train.test_adapter import held_bytes, in_four_bits
from tightfit.models.generate import Sampling, generate
from tightfit.models.loading import LoadedModel, load_model, weights_path
from tightfit.train.loop import run_job

pytest.importorskip("uvicorn", reason="pip install 'tightfit[serve]'")
PROMPT = "the quick"
TOKENS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Path:
    """Adapters that were trained on four-bit weights."""
    folder = tmp_path_factory.mktemp("adapters")
    small = {"steps": 6, "evaluation": {"max_rows": 1}}
    whole = run_job(tiny_job(folder / "whole", corpus, token_cache, **small), quiet=True)
    packed = in_four_bits(whole.run, folder / "packed")
    more = {"tokenizer": {"source": "model"}, "adapter": {"rank": 4}, "optimizer": {"lr": 3e-2}}
    job = tiny_job(folder / "run", corpus, token_cache, **small, **more, model={"source": str(packed)})
    run_job(job, quiet=True)
    return folder / "run"


@pytest.fixture(scope="module")
def expanded(run: Path) -> LoadedModel:
    return load_model(str(run), packed=False)


@pytest.fixture(scope="module")
def said(expanded: LoadedModel) -> str:
    """What the expanded model says to the prompt, likeliest token after likeliest token."""
    assert expanded.tokenizer is not None
    ids = expanded.tokenizer.encode(PROMPT)
    sampling = Sampling(max_tokens=TOKENS, temperature=0)
    steps = generate(expanded.model, ids, sampling, stop_ids=expanded.tokenizer.stop_ids)
    return expanded.tokenizer.decode([token for step in steps for token in step if token is not None])


def test_sample(run: Path, said: str, tightfit: Any) -> None:
    made = tightfit("sample", run, "-p", PROMPT, "-n", TOKENS, "-t", 0, "--json")
    assert made.json["continuations"] == [said]


def test_evaluate(run: Path, expanded: LoadedModel, tightfit: Any, tmp_path: Path, token_cache: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    (tmp_path / "text.txt").write_text(text)
    made = tightfit("evaluate", run, "--data", tmp_path / "text.txt", "--cache", token_cache, "--json")
    assert expanded.tokenizer is not None
    ids = torch.tensor([[*expanded.tokenizer.encode(text), expanded.tokenizer.eos_id]])
    logits = expanded.model(ids[:, :-1]).logits
    assert logits is not None
    truth = torch.nn.functional.cross_entropy(logits[0].double(), ids[0, 1:])
    assert made.json["loss"] == pytest.approx(truth.item(), rel=1e-5)


def test_generate(run: Path, said: str, tightfit: Any, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"id": "one", "prompt": PROMPT}) + "\n")
    out = tmp_path / "out.jsonl"
    made = tightfit("generate", run, "--in", tmp_path / "in.jsonl", "--out", out, "-n", TOKENS, "-t", 0)
    assert made.code == 0, made.err
    assert json.loads(out.read_text())["text"] == said


def test_serve(run: Path, said: str, tmp_path: Path) -> None:
    with serving(run, tmp_path, "--cache-gib", "0.01") as (_, port):
        asked = ask(port, model="tiny", prompt=PROMPT, max_tokens=TOKENS, temperature=0)
        answer = json.load(urllib.request.urlopen(asked, timeout=60))
    assert answer["choices"][0]["text"] == said


def test_plan_of_serving(run: Path, tightfit: Any) -> None:
    """The weights' line is what is held once it is loaded, to the byte; of a run and of its checkpoint."""
    asked = ("--on", "T4", "--serve", "--context", "64", "--json")
    planned, of_run = (tightfit("plan", source, *asked).json for source in (weights_path(str(run)), run))
    assert of_run["ledger"] == planned["ledger"]
    held = held_bytes(load_model(str(run), dtype=torch.bfloat16).model)
    lines = [line for line in planned["ledger"] if line["component"] == "weights"]
    assert {line["bytes"] for line in lines} == {held}
    assert held < 2 * load_model(str(run)).model.spec.params()
    assert planned["quantize"] == "int4 g32 asym"
