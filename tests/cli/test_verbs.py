"""Every verb as a user runs it: what it prints, its JSON, its exit codes, and one sentence for every mistake."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.train.jobs import tiny_job
from tightfit.cli import main as cli
from tightfit.models.loading import load_model


class Run:
    """One invocation through the real entry point."""

    def __init__(self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
        monkeypatch.setattr("sys.argv", ["tightfit", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        self.code = stopped.value.code
        self.out, self.err = capfd.readouterr()

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def tightfit(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *arguments: Run(capfd, monkeypatch, *map(str, arguments))


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("job")
    job = tiny_job(folder / "run", corpus, token_cache, steps=12, evaluation={"prompts": ["the "], "sample_tokens": 4})
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job.model_dump(mode="json")))
    return path


@pytest.fixture(scope="module")
def run(job_file: Path) -> Path:
    outcome = CliRunner().invoke(cli.app, ["train", str(job_file)])
    assert outcome.exit_code == 0, outcome.output
    return job_file.parent / "run"


def test_train_shows_the_outcome_and_what_to_try_next(run: Path, job_file: Path, tightfit: Any) -> None:
    again = tightfit("train", job_file, "--overwrite")
    assert again.code == 0
    for word in ("held-out loss", "→", "tokens/s", "peak memory", "step-00000012", "tightfit sample", "the "):
        assert word in again.out
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "step 12" in again.err


def test_train_json_and_overrides(run: Path, job_file: Path, tightfit: Any, tmp_path: Path) -> None:
    made = tightfit("train", job_file, "-o", f"output={tmp_path / 'other'}", "-o", "steps=2", "--json")
    assert made.code == 0
    assert (made.json["step"], made.json["steps"]) == (2, 2)
    assert made.json["end"]["loss"] > 0
    resumed = tightfit("train", tmp_path / "other", "-o", "steps=3", "--resume", "--json")
    assert resumed.json["step"] == 3


def test_train_fields(tightfit: Any) -> None:
    rows = tightfit("train", "--fields", "--json").json
    assert {"path", "type", "default", "meaning"} <= set(rows[0])
    assert "optimizer.lr" in tightfit("train", "--fields").out


def test_sample_is_deterministic_and_streams_text(run: Path, tightfit: Any) -> None:
    first = tightfit("sample", run, "-p", "the quick", "-n", 8, "--json")
    second = tightfit("sample", run, "-p", "the quick", "-n", 8, "--json")
    assert first.json == second.json
    assert len(first.json["continuations"]) == 1
    several = tightfit("sample", run, "-p", "the", "-n", 4, "-c", 3, "-t", 1.5, "--json").json["continuations"]
    assert len(set(several)) > 1
    assert tightfit("sample", run, "-p", "the quick", "-n", 8).out.strip() in first.json["continuations"][0] + "\n"


def test_evaluate_agrees_with_a_plain_forward(run: Path, tightfit: Any, tmp_path: Path, token_cache: Path) -> None:
    import torch

    text = "the quick brown fox jumps over the lazy dog"
    (tmp_path / "text.txt").write_text(text)
    made = tightfit("evaluate", run, "--data", tmp_path / "text.txt", "--cache", token_cache, "--json")
    loaded = load_model(str(run))
    assert loaded.tokenizer is not None
    ids = torch.tensor([[*loaded.tokenizer.encode(text), loaded.tokenizer.eos_id]])
    logits = loaded.model(ids[:, :-1]).logits
    assert logits is not None
    truth = torch.nn.functional.cross_entropy(logits[0].double(), ids[0, 1:])
    assert made.json["tokens"] == ids.shape[1] - 1
    assert made.json["loss"] == pytest.approx(truth.item(), rel=1e-5)
    assert "perplexity" in tightfit("evaluate", run, "--data", tmp_path / "text.txt", "--cache", token_cache).out


def test_models_lists_presets_with_their_sizes(tightfit: Any) -> None:
    assert tightfit("models", "--json").json["llama-3.1-8b"]["params"] == 8_030_261_248
    assert "8,030,261,248" in tightfit("models").out
    assert tightfit("models", "mixtral-8x7b", "--json").json["experts"] == "2/8"
    assert "32000" in tightfit("models", "llama-2-7b").out.replace(",", "")


def test_export_to_hugging_face_and_gguf(run: Path, tightfit: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pytest.importorskip("gguf", reason="pip install 'tightfit[gguf]'")

    made = tightfit("export", run, tmp_path / "hf", "--dtype", "fp32", "--json")
    assert made.code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert made.json["params"] == sum(p.numel() for p in model.parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").decode([5])
    assert tightfit("export", run, tmp_path / "model.gguf", "--format", "gguf", "--dtype", "fp32").code == 0
    sampled = [
        tightfit("sample", source, "-p", "the quick", "-t", 0, "-n", 8, "--json").json
        for source in (run, tmp_path / "hf", tmp_path / "model.gguf")
    ]
    assert sampled[0] == sampled[1] == sampled[2]


MISTAKES: list[tuple[list[str], list[str]]] = [
    (["train", "absent.yaml"], ["absent.yaml"]),
    (["train", "JOB", "-o", "optimizer.lr=oops"], ["optimizer.lr", "oops"]),
    (["train", "JOB"], ["already holds a run", "--resume"]),
    (["train", "JOB", "-o", "data.train=[absent.txt]", "-o", "output=NEW"], ["absent.txt"]),
    (["train", "JOB", "-o", "data.train=[EMPTY]", "-o", "output=NEW"], ["EMPTY"]),
    (["train", "JOB", "-o", "device=cuda", "-o", "output=NEW"], ["cuda"]),
    (["train", "JOB", "-o", "data.sequence_length=100000", "-o", "output=NEW"], ["100000", "positions"]),
    (["sample", "absent-model", "-p", "x"], ["absent-model"]),
    (["sample", "llama-3.1-8b", "-p", "x"], ["llama-3.1-8b", "weights"]),
    (["sample", "RUN", "-p", "x", "-t", "-1"], ["temperature", "-1"]),
    (["sample", "RUN", "-p", "x", "--top-p", "7"], ["top_p", "7"]),
    (["evaluate", "RUN", "--data", "absent.txt"], ["absent.txt"]),
    (["evaluate", "RUN", "--data", "TEXT", "--seq", "1"], ["1"]),
    (["evaluate", "RUN", "--data", "TEXT", "--seq", "1000000"], ["1000000", "positions"]),
    (["models", "llama-3.1-8x"], ["llama-3.1-8x", "llama-3.1-8b"]),
    (["export", "RUN", "EXISTING"], ["exists already"]),
    (["export", "RUN", "NEW", "--dtype", "q8_0"], ["q8_0", "gguf"]),
    (["export", "RUN", "TEXT/below"], ["cannot write"]),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=lambda value: " ".join(value)[:50])
def test_mistakes_are_one_sentence_and_exit_code_2(
    arguments: list[str], words: list[str], run: Path, job_file: Path, tightfit: Any, tmp_path: Path
) -> None:
    (tmp_path / "EXISTING").mkdir()
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "TEXT").write_text("some text")
    (tmp_path / "TEXT.txt").write_text("some text")
    places = {"JOB": str(job_file), "RUN": str(run), "TEXT": str(tmp_path / "TEXT.txt")}
    for name in ("NEW", "EXISTING", "EMPTY"):
        places[name] = str(tmp_path / name)

    def filled(argument: str) -> str:
        for name, place in places.items():
            argument = argument.replace(name, place)
        return argument

    before = set(tmp_path.rglob("*"))
    made = tightfit(*map(filled, arguments))
    assert made.code == 2
    sentence = made.err.strip().splitlines()[-1]
    assert sentence.startswith("tightfit: ")
    assert "Traceback" not in made.err
    for word in words:
        assert filled(word) in sentence
    left = set(tmp_path.rglob("*")) - before
    assert not [path for path in left if path.suffix == ".safetensors" or path.name.startswith(".")]


def test_usage_errors_exit_with_2(tightfit: Any) -> None:
    for arguments in (["nonsense"], ["evaluate"], ["train", "--stop-after", "0"]):
        assert tightfit(*arguments).code == 2
    assert tightfit("--version").out.strip()
