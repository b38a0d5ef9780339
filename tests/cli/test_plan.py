"""`tightfit plan` and `tightfit hardware` as users run them: the object, the pictures in text, files, and mistakes."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.reports.documentation import ROOT
from tests.cli.test_base_install import base_install
from tests.covering import sampled
from tests.speed import million_turns_s, python_s, within_turns
from tightfit.models.huggingface.config import config_from_spec
from tightfit.models.presets import preset
from tightfit.plan.plan import Plan

EIGHT = ("plan", "llama-3.1-8b", "--on", "8xV100-32GB", "--seq", "512", "--global-batch", "8")
PROMISED = {
    "fits",
    "gpu_peak_bytes",
    "host_peak_bytes",
    "step_seconds",
    "tokens_per_second",
    "layout",
    "levers",
    "ledger",
    "alternatives",
}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def test_json_is_one_object_with_what_is_promised(tightfit: Any) -> None:
    made = tightfit(*EIGHT, "--json")
    assert made.code == 0
    assert set(made.json) >= PROMISED
    assert made.json["fits"] is True
    assert {"component", "phase", "place", "bytes"} <= set(made.json["ledger"][0])
    moments: dict[tuple[str, int], int] = {}
    for line in made.json["ledger"]:
        if line["place"] == "gpu":
            key = (line["phase"], line["rank"])
            moments[key] = moments.get(key, 0) + line["bytes"]
    assert max(moments.values()) == pytest.approx(made.json["gpu_peak_bytes"], rel=1e-6)
    assert made.json["alternatives"][0].keys() >= {"layout", "levers", "step_seconds", "slower"}
    assert made.json["tokens_per_second"] == pytest.approx(8 * 512 / made.json["step_seconds"])


def test_text_says_the_same(tightfit: Any) -> None:
    made, data = tightfit(*EIGHT), tightfit(*EIGHT, "--json").json
    assert "fits" in made.out
    assert f"{data['gpu_peak_bytes'] / 2**30:.2f} GiB of 31.73 GiB a GPU" in made.out
    for word in ("optimizer states", "█", "░", "time of a step", "Next best", "8 rows × 512"):
        assert word in made.out


def test_what_does_not_fit_says_by_how_much_and_what_would(tightfit: Any) -> None:
    arguments = ["plan", "llama-3.1-8b", "--on", "H100-80GB", "--seq", 4096, "--global-batch", 8]
    arguments += ["-o", "levers.offload=none"]
    made, data = tightfit(*arguments), tightfit(*arguments, "--json").json
    assert made.code == 4
    assert data["fits"] is False
    assert data["missing_bytes"] == data["gpu_peak_bytes"] - int(79.10 * 2**30)
    assert f"{data['missing_bytes'] / 2**30:.2f} GiB too much" in made.out
    for change in ("the planner's choice: levers.offload", "more cards: 2xH100-80GB", "another card: 1xH200-141GB"):
        assert change in made.out
        assert any(each.startswith(change) for each in data["changes"])
    assert "GiB of host memory a node" in made.out


def test_time_of_a_whole_job(tightfit: Any) -> None:
    arguments = ("plan", "llama-3.1-8b", "--on", "8xH100-80GB", "--seq", 8192, "--batch-tokens", "16M")
    data = tightfit(*arguments, "--tokens", "15T", "--json").json
    assert data["steps"] == -(-15 * 10**12 // (data["workload"]["global_batch"] * 8192))
    assert data["job_seconds"] == pytest.approx(data["steps"] * data["step_seconds"])
    assert "GPU hours" in tightfit(*arguments, "--tokens", "15T").out


def test_serving(tightfit: Any) -> None:
    arguments = ("plan", "llama-3.1-8b", "--on", "T4", "--serve", "--quantize", "q8_0", "--context", 4096, "--batch", 1)
    data = tightfit(*arguments, "--json").json
    assert data["fits"] is True
    assert "fits" in tightfit(*arguments).out
    large = tightfit("plan", "llama-3.1-8b", "--on", "T4", "--serve")
    assert large.code == 4
    assert "does not fit" in large.out
    assert "--quantize q8_0" in large.out


def test_saved_and_exported(tightfit: Any, tmp_path: Path) -> None:
    plan, folder = tmp_path / "plan.json", tmp_path / "exports"
    made = tightfit(
        *EIGHT,
        "--save",
        plan,
        "--export",
        folder,
        "--export",
        f"slurm={tmp_path / 's.sh'}",
        "-o",
        "layout.data=8",
    )
    assert made.code == 0
    assert f"tightfit launch {plan}" in made.out
    loaded = Plan.load(plan)
    assert loaded.layout.data == 8
    assert json.loads((folder / "deepspeed.json").read_text())["train_batch_size"] == 8
    assert (tmp_path / "s.sh").is_file()


def test_what_cannot_be_exported_is_said(tightfit: Any, tmp_path: Path) -> None:
    made = tightfit(*EIGHT, "--export", tmp_path, "-o", "layout.tensor=2")
    assert made.code == 0
    assert re.search(r"no deepspeed.json: .*layout.tensor=2; plan with -o layout.tensor=1", " ".join(made.out.split()))
    assert (tmp_path / "torchrun.sh").is_file()
    assert not (tmp_path / "deepspeed.json").exists()


def test_a_job_file_is_planned_with_its_own_fields(tightfit: Any, tmp_path: Path) -> None:
    job = {
        "model": "llama-3.2-1b",
        "data": {"train": ["notes.txt"], "sequence_length": 2048},
        "output": "runs/x",
        "steps": 10,
        "global_batch": 64,
        "layout": {"zero": 2, "data": 8},
        "optimizer": {"lr": 1e-5},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    made = tightfit("plan", tmp_path / "job.yaml", "--on", "8xA100-80GB", "--save", tmp_path / "plan.json", "--json")
    plan = Plan.load(tmp_path / "plan.json")
    assert made.json["layout"]["zero"] == 2
    assert (plan.workload.sequence_length, plan.workload.global_batch, plan.steps) == (2048, 64, 10)
    fields = plan.job_fields()
    assert fields["optimizer"]["lr"] == 1e-5
    assert fields["data"] == {"train": ["notes.txt"], "sequence_length": 2048}
    assert fields["output"] == str(Path.cwd() / "runs" / "x")


def test_a_job_that_goes_on_from_a_run_is_planned_like_its_newest_checkpoint(tightfit: Any, tmp_path: Path) -> None:
    """As the model and as its teacher; that of several checkpoints whose number is the highest counts."""
    run = tmp_path / "run"
    for step, name in ((9, "tiny-qwen2"), (10, "tiny-llama"), (8, "tiny-qwen2")):
        folder = run / "checkpoints" / f"step-{step:08}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config_from_spec(preset(name), dtype="float32")))
    made = []
    for source in (run, run / "checkpoints" / "step-00000010"):
        fields = {"model": str(source), "data": "x.txt", "output": "out", "steps": 3, "distill": {"teacher": "model"}}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(fields))
        made.append(tightfit("plan", tmp_path / "job.yaml", "--on", "T4", "--json"))
        assert made[-1].code == 0, made[-1].err
    assert made[0].json["ledger"] == made[1].json["ledger"]
    assert tightfit("plan", run, "--on", "T4").code == 0
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    assert "is a run without a complete checkpoint" in tightfit("plan", tmp_path / "begun", "--on", "T4").err


def test_a_vocabulary_that_will_be_trained_is_the_one_that_is_counted(tightfit: Any, tmp_path: Path) -> None:
    """On one card without levers the optimizer's two fp32 states of an embedding are 8 bytes a weight."""

    def states_bytes(**fields: Any) -> int:
        job = {"model": {"source": "llama-3.2-1b"}, "data": "x.txt", "output": "o", "steps": 3, "global_batch": 1}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump({**job, **fields}))
        made = tightfit("plan", tmp_path / "job.yaml", "--on", "H100-80GB", "-o", "levers.offload=none", "--json")
        lines = [line for line in made.json["ledger"] if line["component"] == "optimizer states"]
        return max(line["bytes"] for line in lines if line["phase"] == "optimizer")

    own = states_bytes()
    trained = states_bytes(tokenizer={"source": "train", "vocab_size": 4096})
    named = states_bytes(model={"source": "llama-3.2-1b", "shape": {"vocab_size": 4096}})
    assert trained == named
    assert own - trained == 8 * (128_256 - 4096) * 2048


def test_confirm_simulates_the_plan(tightfit: Any) -> None:
    arguments = ("plan", "tiny-llama", "--on", "2xT4", "--seq", 64, "--global-batch", 8, "--confirm")
    data = tightfit(*arguments, "--json").json
    assert data["simulation"]["fits"] is True
    assert data["simulation"]["ledger"]["source"] == "simulation"
    assert "simulated: fits" in tightfit(*arguments).out


def test_estimators_stand_beside_ours(tightfit: Any) -> None:
    data = tightfit(*EIGHT, "--compare-estimators", "--json").json
    assert [row["who"] for row in data["estimators"]] == ["tightfit", "DeepSpeed", "accelerate"]
    assert "The same question to others" in tightfit(*EIGHT, "--compare-estimators").out


def test_counts_and_sizes_are_taken_as_people_write_them(tightfit: Any) -> None:
    asked = ("plan", "smollm2-135m", "--on", "T4", "--host-memory", "64G", "--json")
    short = tightfit(*asked, "--seq", "1k", "--batch-tokens", "4k", "--tokens", "8K").json
    assert short == tightfit(*asked, "--seq", 1000, "--global-batch", 4, "--steps", 2).json
    served = ("plan", "smollm2-135m", "--on", "T4", "--serve", "--json")
    assert (
        tightfit(*served, "--context", "2k", "--batch", 4).json
        == tightfit(*served, "--context", 2000, "--batch", 4).json
    )


def test_batch_splits_tokens_over_ranks(tightfit: Any) -> None:
    """DeepSeek-V3: 61 M = 1920 × 32 K, 1920 = 16 × 120."""
    arguments = ("batch", "--tokens", "61.44M", "--seq", 32000, "--ranks", 120)
    rows = tightfit(*arguments, "--json").json["splits"]
    assert {"micro_batch": 1, "accumulation": 16, "ranks": 120} in rows
    assert (
        "1,920 rows × 32,000 = 61.4 M tokens a step = micro-batch 1 × accumulation 16 × 120" in tightfit(*arguments).out
    )
    odd = tightfit("batch", "--rows", 7, "--seq", 512, "--ranks", 8)
    assert odd.code == 2
    assert "take 8 rows" in odd.err
    both = tightfit("batch", "--rows", 7, "--tokens", "1M", "--seq", 512, "--ranks", 8)
    assert "give one of the two" in both.err
    assert "neither --rows nor --tokens" in tightfit("batch", "--seq", 512).err
    assert "--tokens is 0" in tightfit("batch", "--tokens", "0", "--seq", 512).err
    assert "less than" in tightfit("batch", "--rows", 128, "--seq", 512, "--ranks", 128).out


def test_hardware_lists_the_catalog(tightfit: Any) -> None:
    rows = tightfit("hardware", "--json").json
    assert {"name", "memory_bytes", "source", "rates"} <= set(rows[0])
    text = tightfit("hardware").out
    assert "MI300X-192GB" in text
    assert "989.4" in text
    assert "NVIDIA H100 data sheet" in text


def test_hardware_fits_a_terminal_and_shows_one_card(tightfit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = tightfit("hardware").out.splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("RTX3060-12GB ") for line in lines) == 1
    one = tightfit("hardware", "A100-80GB:pcie").out
    assert "79.14 GiB" in one
    assert "NVIDIA A100 data sheet (2021)" in one
    assert "1,935 GB/s" in one
    assert "A100-40GB or A100-80GB" in tightfit("hardware", "A100").err


MISTAKES: list[tuple[list[str], list[str]]] = [
    (["llama-3.1-8x", "--on", "T4"], ["llama-3.1-8x", "llama-3.1-8b"]),
    (["job.yaml", "--on", "T4", "--serve"], ["job.yaml is a job file", "name its model or its run"]),
    (["llama-3.1-8b", "--on", "0xT4"], ["0 GPUs"]),
    (["llama-3.1-8b", "--on", "8xH101-80GB"], ["H101-80GB", "H100-80GB"]),
    (["llama-3.1-8b", "--on", "A100"], ["A100-40GB or A100-80GB"]),
    (["llama-3.1-8b", "--on", "T4", "--seq", "0"], ["--seq is 0; give at least 2"]),
    (["llama-3.1-8b", "--on", "T4", "--seq", "1.5"], ["--seq is '1.5'; write a whole number"]),
    (["llama-3.1-8b", "--on", "T4", "--global-batch", "0"], ["--global-batch is 0; give at least 1"]),
    (["llama-3.1-8b", "--on", "8xT4", "--global-batch", "7", "-o", "layout.data=8"], ["global batch 7", "8"]),
    (["llama-3.1-8b", "--on", "8xT4", "--global-batch", "8", "--batch-tokens", "4M"], ["give one of the two"]),
    (["llama-3.1-8b", "--on", "8xT4", "--batch-tokens", "lots"], ["--batch-tokens", "lots"]),
    (["llama-3.1-8b", "--on", "8xT4", "--steps", "5", "--tokens", "1T"], ["give one of the two"]),
    (["llama-3.1-8b", "--on", "8xT4", "-o", "layout.tensor=3"], ["layout.tensor is 3", "8 GPUs"]),
    (["llama-3.1-8b", "--on", "T4", "-o", "layout.tensor=3"], ["the machine's 1 GPU; change one"]),
    (["llama-3.1-8b", "--on", "8xT4", "-o", "layout.colour=red"], ["layout.colour"]),
    (["llama-3.1-8b", "--on", "8xT4", "-o", "nonsense"], ["nonsense"]),
    (["llama-3.1-8b", "--on", "8xT4", "--precision", "bf16"], ["T4-16GB has no bf16"]),
    (["llama-3.1-8b", "--on", "8xT4", "--host-memory", "plenty"], ["--host-memory", "plenty"]),
    (["llama-3.1-8b", "--on", "T4", "--serve", "--quantize", "q1"], ["--quantize", "q1"]),
    (["llama-3.1-8b", "--on", "T4", "--quantize", "q8_0"], ["--quantize is q8_0", "--serve"]),
    (["llama-3.1-8b", "--on", "T4", "--context", "99"], ["--context is 99", "--serve"]),
    (["llama-3.1-8b", "--on", "T4", "--serve", "--save", "plan.json"], ["--save is plan.json", "about training"]),
    (["llama-3.1-8b", "--on", "T4", "--serve", "-o", "layout.zero=3"], ["--pin is layout.zero=3", "about training"]),
    (["llama-3.1-8b", "--on", "T4", "--serve", "--confirm"], ["--confirm is given", "about training"]),
    (["llama-3.1-8b", "--on", "1000000000xT4"], ["1000000000 GPUs"]),
    (["absent.yaml", "--on", "T4"], ["absent.yaml"]),
    (["llama-3.2-1b", "--on", "8xH100-80GB", "--save", "absent/plan.json"], ["absent/plan.json"]),
    (["llama-3.2-1b", "--on", "8xH100-80GB", "--export", "megatron=x"], ["megatron"]),
]


@sampled(2)
@pytest.mark.parametrize(
    "arguments",
    [
        ("llama-3.2-1b", "--on", "8xH100-80GB", "--global-batch", 10**18),
        ("llama-3.2-1b", "--on", "8xH100-80GB", "--tokens", "999999T"),
        ("llama-3.2-1b", "--on", "8xH100-80GB", "--batch-tokens", "999999T"),
        ("deep.yaml", "--on", "8xH100-80GB"),
    ],
    ids=str,
)
def test_absurd_questions_are_answered(
    arguments: tuple[Any, ...], tightfit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    deep = {
        "model": {"source": "llama-3.2-1b", "shape": {"layers": 3_000}},
        "data": "x.txt",
        "output": "o",
        "steps": 3,
    }
    (tmp_path / "deep.yaml").write_text(yaml.safe_dump(deep))
    with within_turns(180):
        made = tightfit("plan", *arguments)
    assert made.code in (0, 4)
    assert "a step" in made.out


def test_batches_too_large_to_list_are_a_sentence(tightfit: Any) -> None:
    assert "give at most" in tightfit("batch", "--rows", 10**18, "--seq", 512).err
    assert tightfit("batch", "--rows", 10**11, "--seq", 512).code == 0


def test_rows_longer_than_the_model_are_planned_with_a_note(tightfit: Any) -> None:
    made = tightfit("plan", "llama-3.1-8b", "--on", "8xH100-80GB", "--seq", 2**20, "--global-batch", 8)
    assert made.code in (0, 4)
    assert "1,048,576 tokens, but the model has 131,072 positions; extend them" in made.out


@pytest.mark.parametrize("columns", [40, 60])
@pytest.mark.parametrize("words", [EIGHT, ("plan", "llama-3.2-1b", "--on", "T4", "--serve")], ids=["train", "serve"])
def test_the_bars_fit_a_narrow_terminal(
    columns: int, words: tuple[str, ...], tightfit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    bars = [line for line in tightfit(*words).out.splitlines() if any(mark in line for mark in "█░▏")]
    assert "GiB of" in bars[0]
    assert all(line.startswith("  ") and "iB" in line and len(line) <= columns for line in bars)


def test_lines_in_a_pipe_are_whole(tightfit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tightfit plan … | grep tokens/s`"""
    monkeypatch.delenv("COLUMNS")
    (headline,) = (line for line in tightfit(*EIGHT).out.splitlines() if "tokens/s" in line)
    assert headline.startswith("llama-3.1-8b on 8xV100-32GB: fits, ")
    served = tightfit("plan", "llama-3.2-1b", "--on", "T4", "--serve").out
    assert any(line.startswith("decode") and "for 1 request of 4,096 tokens" in line for line in served.splitlines())
    assert any(line.startswith("room") and line.rstrip().endswith("at a time") for line in served.splitlines())


def test_mfu_is_told_and_the_bar_fits_the_terminal(tightfit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    made, data = tightfit(*EIGHT), tightfit(*EIGHT, "--json").json
    bar = next(line for line in made.out.splitlines() if "░" in line)
    assert bar.endswith("of 31.73 GiB")
    assert max(len(line) for line in made.out.splitlines() if not line.startswith("·")) <= 80  # notes are sentences
    flops = 6 * 7.504e9 + 6 * 32 * 4096 * 512  # weights that multiply; causal attention
    assert data["mfu"] == pytest.approx(flops * data["tokens_per_second"] / (8 * 125e12), rel=0.01)
    assert f"{data['mfu']:.1%}" in made.out


@pytest.mark.parametrize("content", ["model: llama-3.2-1b\n", '{"format": 99}', "\x00\xff"])
def test_saving_does_not_overwrite_what_is_no_plan(content: str, tightfit: Any, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(content, encoding="latin-1")
    made = tightfit(*EIGHT, "--save", tmp_path / "job.yaml")
    assert made.code == 2
    assert "is there already and is not a plan" in made.err
    assert (tmp_path / "job.yaml").read_text(encoding="latin-1") == content
    assert [each.name for each in tmp_path.iterdir()] == ["job.yaml"]


def test_a_card_without_narrow_numbers_is_planned_in_wide_ones(tightfit: Any, tmp_path: Path) -> None:
    fields = "family: Old\nmemory_gb: 24\nbandwidth_gb_s: 300\nfp32: 10\nhost_link: pcie3\npeer_link: pcie3\n"
    (tmp_path / "card.yaml").write_text(fields)
    asked = ("plan", "tiny-llama", "--on", tmp_path / "card.yaml", "--seq", 128)
    assert tightfit(*asked, "--json").json["workload"]["precision"] == "fp32"
    refused = tightfit(*asked, "--precision", "bf16")
    assert refused.code == 2
    assert "has no bf16 units; use --precision fp32 or another card" in refused.err


def test_saving_replaces_a_plan(tightfit: Any, tmp_path: Path) -> None:
    for rows in (8, 16):
        assert tightfit(*EIGHT[:-1], rows, "--save", tmp_path / "plan.json").code == 0
        assert Plan.load(tmp_path / "plan.json").workload.global_batch == rows
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=lambda value: " ".join(value)[:60])
def test_mistakes_are_one_sentence_and_exit_code_2(arguments: list[str], words: list[str], tightfit: Any) -> None:
    made = tightfit("plan", *arguments)
    assert made.code == 2
    assert made.err.startswith("tightfit: ")
    assert made.err.count("\n") == 1
    for word in words:
        assert word in made.err


def test_a_wrong_export_is_refused_before_anything_is_saved(tightfit: Any, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    made = tightfit("plan", "llama-3.2-1b", "--on", "H100-80GB", "--save", str(saved), "--export", "megatron=x")
    assert made.code == 2
    assert not saved.exists()


def test_the_pages_commands_run_as_written(tightfit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    commands = re.findall(r"^(tightfit .+)$", page, flags=re.MULTILINE)
    job = {"model": "llama-3.2-1b", "data": "notes.txt", "output": "runs/x", "steps": 10}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    monkeypatch.chdir(tmp_path)
    assert len(commands) >= 5
    for command in commands:
        made = tightfit(*shlex.split(command)[1:])
        assert made.code == (4 if "levers.offload=none" in command else 0), (command, made.err)
    assert Plan.load(tmp_path / "plan.json").model == "llama-3.2-1b"
    assert (tmp_path / "exports" / "torchrun.sh").is_file()


def test_planning_needs_no_torch_and_little_time() -> None:
    """About a second of a processor that makes 18 million turns of a loop in it, and thrice what libraries take."""
    made = base_install(*EIGHT, "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["fits"] is True
    libraries_s = python_s("-c", "import pydantic, typer, rich, yaml")
    assert python_s("-m", "tightfit", *EIGHT, "--json") < 18 * million_turns_s() + 3 * libraries_s


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (
            ("smollm2-135m", "--on", "2xV100-16GB"),
            "tightfit launch PLAN -o data.train=FILES -o output=DIRECTORY -o steps=COUNT -o tokenizer.source=train",
        ),
        (("JOB", "--on", "T4"), "tightfit train PLAN"),
        (
            ("llama-3.2-1b", "--on", "2x8xA100-80GB", "--tokens", "1B"),
            "tightfit launch PLAN --nodes 2 -o data.train=FILES -o output=DIRECTORY -o tokenizer.source=train",
        ),
    ],
)
def test_the_command_that_runs_a_saved_plan_can_be_followed(
    words: tuple[str, ...], command: str, tightfit: Any, tmp_path: Path
) -> None:
    """It starts as many processes as the plan has ranks, and names all that the plan leaves open."""
    file, job, text = tmp_path / "plan.json", tmp_path / "job.yaml", tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 2000)
    job.write_text(
        f"model: tiny-llama\ntokenizer: train\noutput: {tmp_path / 'run'}\nsteps: 1\n"
        f"data: {{train: {text}, sequence_length: 64}}\n"
    )
    made = tightfit("plan", *(str(job) if word == "JOB" else word for word in words), "--save", file)
    expected = command.replace("PLAN", str(file))
    assert f"run it with `{expected}`" in made.out
    given = {"FILES": str(text), "DIRECTORY": str(tmp_path / "run"), "COUNT": "1"}
    for name, value in given.items():
        expected = expected.replace(f"={name}", f"={value}")
    followed = shlex.split(expected)[1:]
    checked = tightfit(*followed, *(() if "--nodes" in followed else ("--dry-run",)))
    assert checked.code == 0, checked.err


def test_serving_tells_the_cache_apart_and_long_waits_in_seconds(tightfit: Any) -> None:
    """Keys and values of 4,096 tokens: 28 layers, 2 × 4 heads of 128 numbers of 2 bytes."""
    asked = ("plan", "qwen2.5-7b", "--on", "RTX3060", "--serve", "--quantize", "int4")
    made, data = tightfit(*asked), tightfit(*asked, "--json").json
    cached = [line["bytes"] for line in data["ledger"] if line["component"] == "key/value cache"]
    assert cached == [4096 * 28 * 2 * 4 * 128 * 2]
    assert "key/value cache  224 MiB" in made.out
    assert f"first token  {data['predicted_first_token_s']:.2f} s after a prompt of 4,096 tokens" in made.out
    assert "an H200 reaches" in made.out
    assert data["notes"]
    assert tightfit("plan", "llama-3.2-1b", "--on", "H200", "--serve", "--json").json["notes"] == []


def test_a_batch_that_gpus_cannot_share_evenly_is_told_the_next_one(tightfit: Any) -> None:
    asked = ("plan", "llama-3.2-1b", "--on", "8xA100-80GB", "--seq", 512)
    assert "a global batch of 250 rows is not a multiple of 8 GPUs" in (
        odd := tightfit(*asked, "--global-batch", 250).out
    )
    assert "; 256 rows are" in odd
    assert "a global batch of 1 row is not" in tightfit(*asked, "--global-batch", 1).out
