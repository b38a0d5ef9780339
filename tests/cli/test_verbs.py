"""Every verb as a user runs it: what it prints, its JSON, its exit codes, and one sentence for every mistake."""

import json
import os
import resource
import shlex
import signal
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.train.conftest import make_small
from tests.train.jobs import ended_run, tiny_job
from tightfit.cli import main as cli
from tightfit.jobs.job import Job
from tightfit.models.generate import Sampling, generate
from tightfit.models.loading import load_model
from tightfit.report.next_commands import next_commands
from tightfit.writer_lock import locked_beside

__all__ = ["make_small"]


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


def test_a_dry_run_says_that_levers_will_be_fitted(job_file: Path, tightfit: Any, tmp_path: Path) -> None:
    """`--fit` beside it was passed over."""
    made = tightfit("train", job_file, "-o", f"output={tmp_path / 'other'}", "--dry-run", "--fit")
    assert (made.code, "chosen at the start (fit)" in made.out) == (0, True), made.err
    assert "1 rank on cpu: the CPU, micro-batch" in made.out


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


def test_evaluate_counts_what_the_assistant_says(run: Path, tightfit: Any, tmp_path: Path, token_cache: Path) -> None:
    """Against a plain forward over the rendered conversation, of which the answer alone counts."""
    import torch

    messages = [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": "brown fox"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    made = tightfit("evaluate", run, "--chat", "--data", tmp_path / "chats.jsonl", "--cache", token_cache, "--json")
    loaded = load_model(str(run))
    assert loaded.tokenizer is not None
    ids, mask = loaded.tokenizer.encode_chat(messages)
    logits = loaded.model(torch.tensor([ids[:-1]])).logits
    assert logits is not None
    losses = torch.nn.functional.cross_entropy(logits[0].double(), torch.tensor(ids[1:]), reduction="none")
    counted = torch.tensor(mask[1:])
    assert made.json["tokens"] == int(counted.sum()) > 0
    assert made.json["loss"] == pytest.approx(losses[counted].mean().item(), rel=1e-5)


def test_a_chat_takes_turns_and_a_system_message(run: Path, tightfit: Any) -> None:
    """Each turn is asked with all that was said before, as one prompt of the whole conversation would be."""
    said = tightfit(
        *("sample", run, "--chat", "-t", 0, "-n", 3, "--system", "be brief", "-p", "the quick", "-p", "and", "--json")
    )
    messages = said.json["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    loaded = load_model(str(run))
    assert loaded.tokenizer is not None
    prompt = loaded.tokenizer.render_chat(messages[:-1], add_generation_prompt=True)
    ids = loaded.tokenizer.encode(prompt, parse_special=True)
    steps = generate(loaded.model, ids, Sampling(max_tokens=3, temperature=0), stop_ids=loaded.tokenizer.stop_ids)
    assert loaded.tokenizer.decode([step[0] for step in steps if step[0] is not None]) == messages[-1]["content"]


def test_a_chat_at_the_terminal_asks_until_its_end(run: Path, tightfit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["the quick", "", "and"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)

    def read(_: str) -> str:
        if (line := next(typed, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    made = tightfit("sample", run, "--chat", "-n", 2)
    assert made.code == 0
    assert len(made.out.splitlines()) >= 2


def test_more_tokens_than_positions_are_told(run: Path, tightfit: Any) -> None:
    made = tightfit("sample", run, "-p", "the", "-n", 100_000, "-t", 0)
    assert made.code == 0
    assert "100000 tokens do not fit" in made.err


def test_next_commands_are_true_for_the_run(run: Path, job_file: Path, tightfit: Any, monkeypatch: Any) -> None:
    """They are run as they were printed, from another directory."""
    again = tightfit("train", run, "--resume")
    commands = [line.partition("#")[0] for line in again.out.splitlines() if line.startswith("  tightfit ")]
    assert [shlex.split(command)[1] for command in commands] == ["sample", "evaluate", "export"]
    for command in commands[:2]:
        assert tightfit(*shlex.split(command)[1:]).code == 0


def test_next_commands_of_fine_tuning_name_its_chats(make_small: Callable[..., Job], tmp_path: Path) -> None:
    result = ended_run(tmp_path)
    job = make_small(objective="sft", data={"train": [str(tmp_path / "my chats.jsonl")]})
    sample, evaluate, _ = next_commands(result, job)
    assert shlex.split(sample)[3] == "--chat"
    assert shlex.split(evaluate)[2:] == [str(tmp_path), "--chat", "--data", str(tmp_path / "my chats.jsonl")]


def test_models_lists_presets_with_their_sizes(tightfit: Any) -> None:
    assert tightfit("models", "--json").json["llama-3.1-8b"]["params"] == 8_030_261_248
    assert "8,030,261,248" in tightfit("models").out
    assert tightfit("models", "mixtral-8x7b", "--json").json["experts"] == "2/8"
    assert "32000" in tightfit("models", "llama-2-7b").out.replace(",", "")
    assert "None" not in tightfit("models", "llama-2-7b").out
    scaled = " ".join(tightfit("models", "llama-3.1-8b").out.replace("│", " ").split())
    assert "theta 500,000, rotated_share 1, scaling llama3, factors factor 8" in scaled
    assert "48 numbers" in " ".join(tightfit("models", "phi-3-mini-128k").out.replace("│", " ").split())


def test_export_to_hugging_face_and_gguf(run: Path, tightfit: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pytest.importorskip("gguf", reason="pip install 'tightfit[gguf]'")

    made = tightfit("export", run, tmp_path / "hf", "--dtype", "fp32", "--json")
    assert made.code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert made.json["params"] == sum(p.numel() for p in model.parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").decode([5])
    assert tightfit("export", run, tmp_path / "model.gguf", "--dtype", "fp32").code == 0
    assert (tmp_path / "model.gguf").read_bytes()[:4] == b"GGUF"
    assert tightfit("models", tmp_path / "model.gguf", "--json").json["params"] == made.json["params"]
    sampled = [
        tightfit("sample", source, "-p", "the quick", "-t", 0, "-n", 8, "--json").json
        for source in (run, tmp_path / "hf", tmp_path / "model.gguf")
    ]
    assert sampled[0] == sampled[1] == sampled[2]


EXPORTS = (["model"], ["model.gguf"], ["small.gguf", "--dtype", "q4_0"])


@pytest.mark.parametrize("words", EXPORTS, ids=" ".join)
def test_an_export_has_one_writer_at_a_time(words: list[str], run: Path, tightfit: Any, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="pip install 'tightfit[gguf]'")
    target = tmp_path / words[0]
    with locked_beside(target):
        made = tightfit("export", run, target, *words[1:])
    assert made.code == 2
    assert f"{target} is being written by process {os.getpid()}" in made.err
    assert list(tmp_path.iterdir()) == []
    assert tightfit("export", run, target, *words[1:]).code == 0


@pytest.mark.parametrize("words", EXPORTS, ids=" ".join)
def test_an_export_to_a_full_disk_is_a_sentence(words: list[str], run: Path, tightfit: Any, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="pip install 'tightfit[gguf]'")
    target, before = tmp_path / words[0], resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        made = tightfit("export", run, target, *words[1:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert made.code == 2
    assert f"cannot write {target}: " in made.err
    assert "None" not in made.err
    assert list(tmp_path.iterdir()) == []


MISTAKES: list[tuple[list[str], list[str]]] = [
    (["train", "absent.yaml"], ["absent.yaml"]),
    (["train", "JOB", "-o", "optimizer.lr=oops"], ["optimizer.lr", "oops"]),
    (["train", "JOB"], ["already holds a run", "--resume"]),
    (["train", "JOB", "-o", "data.train=[absent.txt]", "-o", "output=NEW"], ["absent.txt"]),
    (["train", "JOB", "-o", "data.train=[EMPTY]", "-o", "output=NEW"], ["EMPTY"]),
    (["train", "JOB", "-o", "device=cuda", "-o", "output=NEW"], ["cuda"]),
    (["train", "JOB", "-o", "data.sequence_length=100000", "-o", "output=NEW"], ["100000", "positions"]),
    (["sample", "absent-model", "-p", "x"], ["absent-model"]),
    (["compress", "absent-model", "--out", "NEW"], ["there is no model at 'absent-model'"]),
    (["export", "absent-model", "NEW", "--format", "gptq"], ["there is no model at 'absent-model'"]),
    (["sample", "llama-3.1-8b", "-p", "x"], ["llama-3.1-8b", "weights"]),
    (["sample", "RUN", "-p", "x", "-t", "-1"], ["temperature", "-1"]),
    (["sample", "RUN", "-p", "x", "--top-p", "7"], ["top_p", "7"]),
    (["evaluate", "RUN", "--data", "absent.txt"], ["absent.txt"]),
    (["evaluate", "RUN", "--data", "TEXT", "--seq", "1"], ["1"]),
    (["evaluate", "RUN", "--data", "TEXT", "--seq", "0"], ["--seq is 0; give at least 2"]),
    (["evaluate", "RUN", "--data", "TEXT", "--against", "RUN", "--seq", "0"], ["--seq is 0; give at least 2"]),
    (["evaluate", "RUN", "--data", "TEXT", "--against", "RUN", "--precision", "bf16"], ["--precision", "--against"]),
    (["evaluate", "RUN", "--data", "TEXT", "--chat"], ["plain text", "chats are rows"]),
    (["sample", "RUN", "-p", ""], ["prompt is empty", "-p"]),
    (["sample", "RUN", "--chat", "-p", " "], ["message is empty", "-p"]),
    (["sample", "RUN", "-p", "a", "-p", "b"], ["--chat"]),
    (["sample", "RUN", "-p", "a", "--system", "b"], ["--chat"]),
    (["sample", "RUN", "--chat", "-p", "a", "-p", "b", "-c", "2"], ["--count is 2"]),
    (["train", "JOB", "-o", "output=NEW", "--memory", "4GB"], ["--memory", "none"]),
    (["evaluate", "RUN", "--data", "TEXT", "--seq", "1000000"], ["1000000", "positions"]),
    (["models", "llama-3.1-8x"], ["llama-3.1-8x", "llama-3.1-8b"]),
    (["export", "RUN", "EXISTING"], ["exists already"]),
    (["export", "RUN", "NEW", "--dtype", "q8_0"], ["q8_0", "gguf"]),
    (["export", "RUN", "TEXT/below"], ["cannot write"]),
    (["export", "RUN", "NEW.gguf", "--format", "hf"], ["NEW.gguf", "--format is hf"]),
    (["export", "RUN", "NEW.safetensors"], ["NEW.safetensors", "hf is a directory", ".gguf"]),
    (["train", "JOB", "-o", "lr=1e-3"], ["unknown field lr", "did you mean optimizer.lr?"]),
    (["plan", "JOB", "--on", "T4", "-o", "levers.zero=3"], ["levers.zero", "did you mean layout.zero?"]),
    (["export", "RUN", "NEW", "--data", "TEXT"], ["--data", "bf16"]),
    (["export", "RUN", "NEW", "--format", "gptq", "--dtype", "fp16"], ["--dtype", "gptq"]),
    (["plan", "JOB", "--on", "T4", "--seq", "0"], ["--seq is 0; give at least 2"]),
    (["plan", "JOB", "--on", "T4", "--global-batch", "0"], ["--global-batch is 0; give at least 1"]),
    (["plan", "JOB", "--on", "T4", "--steps", "0"], ["--steps is 0; give at least 1"]),
    (["train", "JOB", "--fields"], ["is JOB,", "--fields only lists"]),
    (["train", "--fields", "--from", "step-1"], ["--from is step-1", "--fields only lists"]),
    (["train", "JOB", "-o", "output=NEW", "--dry-run", "--memory", "much"], ["--memory", "much"]),
    (["train", "JOB", "--resume=step-1"], ["--resume is 'step-1'", "--resume=auto", "--from CHECKPOINT"]),
    (["train", "JOB", "--dry-run", "--stop-after", "2"], ["--stop-after is 2", "--dry-run starts nothing"]),
    (["launch", "JOB", "--dry-run", "--restarts", "2"], ["--restarts is 2", "--dry-run starts nothing"]),
    (["launch", "JOB", "--dry-run", "--check"], ["--check is given", "--dry-run starts nothing"]),
    (["launch", "JOB", "--dry-run", "--nodes", "2"], ["--nodes is 2", "--dry-run starts nothing"]),
    (["launch", "JOB", "--head", "node-1"], ["--head is node-1", "--nodes"]),
    (["evaluate", "RUN", "--data", "TEXT", "--chat", "--field", "said"], ["--field is said", "--chat"]),
    (["generate", "RUN", "--in", "PROMPTS", "--out", "NEW", "--beams", "2", "-t", "0.5"], ["--temperature is 0.5"]),
    (
        ["picture", "memory", "--layer", "classic", "--checkpoint-every", "1", "--out", "NEW.png"],
        ["--checkpoint-every"],
    ),
    (
        ["picture", "pipeline", "--run", "RUN", "--ranks", "2", "--out", "NEW.png"],
        ["--ranks is 2", "a run has its own"],
    ),
    (["picture", "pipeline", "--run", "RUN", "--schedule", "2bw", "--out", "NEW.png"], ["--schedule is 2bw"]),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=lambda value: " ".join(value)[:50])
def test_mistakes_are_one_sentence_and_exit_code_2(
    arguments: list[str], words: list[str], run: Path, job_file: Path, tightfit: Any, tmp_path: Path
) -> None:
    (tmp_path / "EXISTING").mkdir()
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "TEXT").write_text("some text")
    (tmp_path / "TEXT.txt").write_text("some text")
    (tmp_path / "PROMPTS.jsonl").write_text('{"prompt": "a"}')
    places = {"JOB": str(job_file), "RUN": str(run)}
    places |= {"TEXT": str(tmp_path / "TEXT.txt"), "PROMPTS": str(tmp_path / "PROMPTS.jsonl")}
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


def test_ctrl_c_is_a_word_and_exit_code_130(tightfit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.models.presets.preset_names", lambda *_: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        made = tightfit("models")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (made.code, made.err.splitlines()[-1]) == (130, "tightfit: interrupted")
    assert "Traceback" not in made.err


@pytest.mark.parametrize("verb", [command.name or command.callback.__name__ for command in cli.app.registered_commands])
def test_help_says_what_was_written(verb: str, tightfit: Any) -> None:
    """Words between colons are emoji to the formatter of help."""
    made = tightfit(verb, "--help")
    assert made.code == 0
    strange = [letter for letter in made.out if ord(letter) > 127 and unicodedata.category(letter) == "So"]
    assert [letter for letter in strange if letter not in "─│╭╮╰╯"] == []


def test_help_wraps_at_the_width_of_the_terminal() -> None:
    """The formatter keeps line breaks, so prose has none; examples, after \\b, have."""
    for command in cli.app.registered_commands:
        paragraphs = (command.help or "").split("\n\n")
        assert paragraphs[0]
        assert [each for each in paragraphs if "\n" in each and not each.startswith("\b")] == []


def test_usage_errors_exit_with_2(tightfit: Any) -> None:
    for arguments in (["nonsense"], ["evaluate"], ["train", "--stop-after", "0"]):
        assert tightfit(*arguments).code == 2
    assert tightfit("--version").out.strip()


@pytest.mark.parametrize("ranks", ["1", "65"])
def test_doctor_refuses_ranks_that_no_machine_has(tightfit: Any, ranks: str) -> None:
    made = tightfit("doctor", "--ranks", ranks)
    assert made.code == 2
    assert "--ranks" in made.err
