"""Whole runs on several ranks: they end as one process does, and go on where any other number of ranks stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.covering import thorough
from tests.distributed.group import Group
from tests.programs import call_forked, run_main
from tests.train.jobs import checkpoint_files, tiny_job
from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.models.loading import load_model
from tightfit.models.resolve import checkpoints_of
from tightfit.parallel.mesh import make_mesh
from tightfit.train.checkpoints.directory import Position, gathered, save_checkpoint
from tightfit.train.loop import RunResult, run_job
from tightfit.train.metrics import read_metrics
from tightfit.train.precision import COMPUTE_DTYPES
from tightfit.train.preparation import prepare

Make = Callable[[int], Group]
Fields = dict[str, Any]
SMALL = {"source": "tiny-llama", "shape": {"layers": 2, "hidden_size": 32, "mlp_size": 48}}


@pytest.fixture
def make(tmp_path: Path, corpus: Path, token_cache: Path) -> Callable[..., Job]:
    def made(name: str, data: int = 1, zero: int = 0, **changes: Any) -> Job:
        layout = {"micro_batch": 1, "data": data, "zero": zero}
        evaluation = {"max_rows": 5, "every": 2}
        fields = {"layout": layout, "evaluation": evaluation, "steps": 4, "optimizer": {"lr": 1e-3}, "model": SMALL}
        fields |= changes
        return tiny_job(tmp_path / name, corpus, token_cache, **fields)

    return made


def run_fields(fields: Fields, options: Fields) -> Fields:
    result = run_job(Job.model_validate(fields), quiet=True, **options)
    return {"step": result.step, "end": result.end, "stopped_by": result.stopped_by, "rank": result.rank}


def run_on(group: Make, job: Job, **options: Any) -> list[Fields]:
    """The job on as many processes as its layout has."""
    return group(job.layout.data).run(run_fields, job.model_dump(mode="json"), options)


def alone(job: Job, **options: Any) -> RunResult:
    return run_job(job, quiet=True, **options)


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step:08d}"
    return load_file(folder / "model.safetensors") | load_file(folder / "training/state.safetensors")


def assert_same_run(found: Path, truth: Path, step: int = 4) -> None:
    """The same files, weights, states and metrics, but for the order of additions."""
    ours, theirs = tensors(found, step), tensors(truth, step)
    assert {n: (t.dtype, t.shape) for n, t in ours.items()} == {n: (t.dtype, t.shape) for n, t in theirs.items()}
    for name, tensor in theirs.items():
        if not name.startswith("rng/"):
            size = tensor.float().norm() + 1e-12
            assert (ours[name].float() - tensor.float()).norm() / size < 1e-3, name
    rows = [read_metrics(run / "metrics.jsonl") for run in (found, truth)]
    for our_row, their_row in zip(*rows, strict=True):
        assert our_row.keys() == their_row.keys()
        for key in our_row.keys() & {"step", "loss", "tokens", "gradient_norm", "held_out_loss", "lr"}:
            assert our_row[key] == pytest.approx(their_row[key], rel=1e-4), (our_row, key)


@pytest.mark.parametrize(("data", "zero"), [thorough(2, 0), thorough(2, 1), (4, 3)])
def test_a_run_ends_as_one_process_s(group: Make, make: Callable[..., Job], data: int, zero: int) -> None:
    job, one = make("many", data, zero), make("one")
    results = run_on(group, job)
    straight = alone(one)
    assert [result["rank"] for result in results] == list(range(data))
    assert all(result["end"] == results[0]["end"] for result in results)
    assert results[0]["end"].tokens == straight.end.tokens
    assert results[0]["end"].loss == pytest.approx(straight.end.loss, rel=1e-5)
    assert_same_run(job.output, one.output)
    assert load_model(str(job.output)).model.spec.vocab_size == 320


@pytest.mark.parametrize(
    ("precision", "data", "zero"),
    [thorough("fp32", 2, 3), ("bf16", 2, 3), thorough("pure-bf16", 2, 3), ("fp32", 4, 0)],
)
def test_stopped_and_resumed_in_the_same_layout_is_bit_equal(
    group: Make, make: Callable[..., Job], precision: str, data: int, zero: int
) -> None:
    """From three replicas on the order of additions counts, and DDP's buckets are others in a run's first step."""
    small = {"precision": precision, "steps": 2, "evaluation": {"max_rows": 1}}
    whole, parts = (make(name, data, zero, **small) for name in ("whole", "parts"))
    run_on(group, whole)
    run_on(group, parts, stop_after=1)
    assert [path.name for path in checkpoints_of(parts.output)] == ["step-00000001"]
    run_on(group, parts, resume=True)
    ours, theirs = (checkpoint_files(checkpoints_of(job.output)[-1]) for job in (parts, whole))
    assert ours == theirs


@pytest.mark.parametrize(
    ("precision", "readers"),
    [("bf16", [(1, 0), (4, 2)]), thorough("bf16", [(2, 0)]), thorough("fp32", [(1, 0), (4, 2)])],
)
def test_another_number_of_ranks_holds_the_same_bits(
    group: Make, make: Callable[..., Job], precision: str, readers: list[tuple[int, int]]
) -> None:
    """Saved by ZeRO-3 on two; loaded and written again by one process, by four under ZeRO-2, and by two replicas."""
    fields = {"precision": precision, "steps": 1, "evaluation": {"max_rows": 1}}
    run_on(group, make("moving", 2, 3, **fields))
    saved = checkpoint_files(checkpoints_of(make("moving").output)[-1])
    for data, zero in readers:
        job, copy = make("moving", data, zero, **fields), make(f"copy-{data}-{zero}").output
        arguments = job.model_dump(mode="json"), str(copy)
        assert group(data).run(write_again, *arguments) if data > 1 else [write_again(*arguments)]
        assert checkpoint_files(checkpoints_of(copy)[-1]) == saved, f"data {data}, zero {zero}"


def write_again(fields: Fields, copy: str) -> None:
    """Load the newest checkpoint of a run and write it elsewhere from what this layout holds of it."""
    job = Job.model_validate(fields)
    mesh = make_mesh(job.layout, "cpu") if job.layout.ranks > 1 else None
    p = prepare(
        job, checkpoints_of(job.output)[-1], lambda _: None, show_bars=False, device=torch.device("cpu"), mesh=mesh
    )
    content = gathered(p.model, p.optimizer, COMPUTE_DTYPES[p.precision], p.ranks)
    if p.ranks.first:
        position = Position(p.position_step, p.loader.state_dict(), asdict(p.scale), {}, p.facts)
        save_checkpoint(Path(copy), content, p.tokenizer, position, keep=1)
    p.ranks.barrier()


@pytest.mark.parametrize("data_and_zero", [thorough((1, 0)), (4, 3)])
def test_training_goes_on_as_if_nothing_had_happened(
    group: Make, make: Callable[..., Job], data_and_zero: tuple[int, int]
) -> None:
    """Two steps under ZeRO-1 on two, two more in another layout: four steps of one process."""
    run_on(group, make("moving", 2, 1), stop_after=2)
    job = make("moving", *data_and_zero)
    run_on(group, job, resume=True) if job.layout.data > 1 else alone(job, resume=True)
    alone(make("one"))
    assert_same_run(job.output, make("one").output)


def test_a_request_to_one_rank_stops_all_after_the_same_step(group: Make, make: Callable[..., Job]) -> None:
    job = make("stopped", 2, 3, steps=100_000, evaluation={"max_rows": 1})
    found = group(2).run(run_and_ask_the_second_rank, job.model_dump(mode="json"))
    assert found[0]["step"] == found[1]["step"] < 100_000
    assert [result["stopped_by"] for result in found] == [signal.SIGTERM, signal.SIGTERM]
    assert checkpoints_of(job.output)[-1].name == f"step-{found[0]['step']:08d}"


def run_and_ask_the_second_rank(fields: Fields) -> Fields:
    import threading

    def ask() -> None:
        metrics = Path(fields["output"]) / "metrics.jsonl"
        while len(read_metrics(metrics)) < 4:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    if dist.get_rank() == 1:
        threading.Thread(target=ask, daemon=True).start()
    return run_fields(fields, {})


def test_ranks_with_different_jobs_all_stop_before_the_first_step(group: Make, make: Callable[..., Job]) -> None:
    job = make("different", 2, 3)
    found = group(2).run(run_with_a_rate_of_its_own, job.model_dump(mode="json"))
    assert all("do not agree on the job or its data" in sentence for sentence in found)
    assert not checkpoints_of(job.output)


def run_with_a_rate_of_its_own(fields: Fields) -> str:
    fields["optimizer"]["lr"] *= 1 + dist.get_rank()
    try:
        run_fields(fields, {})
    except UserError as error:
        return str(error)
    return "nothing was wrong"


def test_pretrained_weights_are_shared_out(group: Make, make: Callable[..., Job]) -> None:
    source = str(alone(make("source", steps=1)).checkpoint)
    changes = {"model": {"source": source}, "tokenizer": {"source": "model"}, "steps": 2}
    job, one = make("many", 4, 3, **changes), make("one", **changes)
    run_on(group, job)
    alone(one)
    assert_same_run(job.output, one.output, 2)


def torchrun(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """As a program, whose processes import torch each for itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tightfit"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def torchs_agent(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """What torchrun is around: its agent, here in a process that has imported torch, and processes forked from that."""
    return call_forked(folder, start_agent, *arguments)


def start_agent(*arguments: str) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="here",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        start_method="fork",
        max_restarts=0,
    )
    elastic_launch(config, run_main)(*arguments)


@pytest.mark.parametrize("launch", [torchs_agent, thorough(torchrun)])
def test_torchrun_trains_and_one_process_goes_on(
    make: Callable[..., Job], tmp_path: Path, launch: Callable[..., tuple[int, str, str]]
) -> None:
    job = make("launched", 2, 3, evaluation={"max_rows": 2, "prompts": ["the quick"], "sample_tokens": 3})
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job.model_dump(mode="json")))
    code, said, told = launch(tmp_path, "train", str(file), "--json")
    assert code == 0, told
    result = json.loads(said)  # one object: the other rank prints nothing
    assert (result["step"], result["rank"]) == (4, 0)
    assert result["samples"][0][0] == "the quick"
    one = make("one", evaluation={"max_rows": 2})
    alone(one)
    assert_same_run(job.output, one.output)
    assert alone(make("launched", steps=6), resume=True).step == 6


def test_a_wrong_number_of_processes_gets_a_sentence_and_writes_nothing(make: Callable[..., Job]) -> None:
    job = make("never", 4, 3)
    with pytest.raises(
        UserError,
        match=r"has 4 rank\(s\), but 1 process\(es\) run; start it with `tightfit launch JOB`, or with torchrun",
    ):
        alone(job)
    assert not job.output.exists()
