"""`engine: deepspeed` on two processes ends as our own engine does on one: losses, norms, weights and states.

Matrices are large enough (100 000 elements) that ZeRO-3 lets go of them between uses, which a test looks at. Processes
are this module's own: DeepSpeed is imported by nobody else, and its buckets, gigabytes of which a small model needs
little, are not filled as new memory of other tests is (MALLOC_PERTURB_ in the Makefile).
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.covering import thorough
from tests.distributed.group import Group
from tests.plan.questions import planned
from tests.programs import run_forked
from tests.train.jobs import tiny_job
from tightfit.errors import UserError
from tightfit.exports.deepspeed import deepspeed_config
from tightfit.jobs.job import Job
from tightfit.jobs.load import parse_job
from tightfit.jobs.workload import Workload
from tightfit.parallel.mesh import make_mesh
from tightfit.plan.job import job_of_plan
from tightfit.train.deepspeed_engine import INSTALL, DeepSpeedModule, load_deepspeed
from tightfit.train.loop import run_job
from tightfit.train.metrics import read_metrics
from tightfit.train.preparation import prepare
from tightfit.train.step import train_step

Fields = dict[str, Any]
Make = Callable[..., Job]
SIZES = {"layers": 2, "hidden_size": 320, "mlp_size": 512}
LLAMA, QWEN = ({"source": source, "shape": SIZES} for source in ("tiny-llama", "tiny-qwen3"))
MIXTRAL = {"source": "tiny-mixtral", "shape": {"layers": 2}}
STEPS = 3
RECOMPUTED = {"checkpoint_every": 1, "tiles": 2, "loss": "plain"}
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason=INSTALL)

CASES: dict[str, Fields] = {
    "zero 3, tied, clipped hard, all on the host, layers run again, three micro-batches": {
        "zero": 3,
        "model": QWEN,
        "optimizer": {"lr": 1e-3, "clip_norm": 0.3},
        "levers": RECOMPUTED | {"offload": "weights"},
        "global_batch": 6,
        "micro_batch": 1,
    },
}
MORE_CASES: dict[str, Fields] = {
    "zero 3, clipped hard, all on the host": {
        "zero": 3,
        "optimizer": {"lr": 1e-3, "clip_norm": 0.3},
        "levers": {"offload": "weights"},
    },
    "zero 3, tied, layers run again, three micro-batches": {
        "zero": 3,
        "model": QWEN,
        "levers": RECOMPUTED,
        "global_batch": 6,
        "micro_batch": 1,
    },
    "zero 1, no clipping, optimizer on the host": {
        "zero": 1,
        "optimizer": {"lr": 1e-3, "clip_norm": 0.0},
        "levers": {"offload": "optimizer"},
    },
    "zero 2, three micro-batches": {"zero": 2, "global_batch": 6, "micro_batch": 1},
    "zero 1, no clipping": {"zero": 1, "optimizer": {"lr": 1e-3, "clip_norm": 0.0}},
    "zero 3, clipped hard": {"zero": 3, "optimizer": {"lr": 1e-3, "clip_norm": 0.3}},
    "zero 3, routed": {"zero": 3, "model": MIXTRAL},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with Group(2, tmp_path_factory.mktemp("deepspeed") / "meeting") as running:
        running.run(leave_memory_as_it_is)
        running.run(compile_nothing)
        yield running


def leave_memory_as_it_is() -> None:
    """glibc's `mallopt(M_PERTURB, 0)`."""
    ctypes.CDLL(None).mallopt(-6, 0)


def compile_nothing() -> None:
    """DeepSpeed marks a function of an optimizer that nobody asks for, for which torch's compiler is imported."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"


@pytest.fixture
def make(tmp_path: Path, corpus: Path, token_cache: Path) -> Make:
    def made(name: str, engine: str, *, data: int, zero: int, micro_batch: int = 2, **changes: Any) -> Job:
        layout = {"micro_batch": micro_batch, "data": data, "zero": zero if data > 1 else 0}
        fields = {
            "engine": engine,
            "layout": layout,
            "evaluation": {"max_rows": 4, "every": 2},
            "steps": STEPS,
            "model": LLAMA,
            "optimizer": {"lr": 1e-3},
        }
        return tiny_job(tmp_path / name, corpus, token_cache, **fields | changes)

    return made


def run_fields(fields: Fields, options: Fields) -> int:
    return run_job(Job.model_validate(fields), quiet=True, **options).step


def alone(make: Make, name: str, case: Fields, **options: Any) -> Path:
    """Our own engine on one process, with nothing of its own to save memory."""
    job = make(name, "tightfit", data=1, **{key: value for key, value in case.items() if key != "levers"})
    run_job(job, quiet=True, **options)
    return job.output


def tensors(run: Path) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{STEPS:08d}"
    states = load_file(folder / "training/state.safetensors")
    return load_file(folder / "model.safetensors") | {n: t for n, t in states.items() if not n.startswith("rng/")}


def assert_same_run(found: Path, truth: Path) -> None:
    rows = [read_metrics(run / "metrics.jsonl") for run in (found, truth)]
    assert sum("loss" in row for row in rows[0]) == STEPS
    for ours, theirs in zip(*rows, strict=True):
        for key in theirs.keys() & {"step", "loss", "tokens", "gradient_norm", "held_out_loss", "lr"}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4), (key, ours, theirs)
    ours, theirs = tensors(found), tensors(truth)
    assert {n: (t.dtype, t.shape) for n, t in ours.items()} == {n: (t.dtype, t.shape) for n, t in theirs.items()}
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).norm() < 1e-3 * (tensor.norm() + 1e-12), name


@pytest.mark.thorough
@needs_deepspeed
@pytest.mark.parametrize("case", [*CASES.values(), *map(thorough, MORE_CASES.values())], ids=list(CASES | MORE_CASES))
def test_ends_as_our_engine_does(pair: Group, make: Make, case: Fields) -> None:
    job = make("theirs", "deepspeed", data=2, **case)
    assert pair.run(run_fields, job.model_dump(mode="json"), {}) == [STEPS, STEPS]
    assert_same_run(job.output, alone(make, "ours", case))


@needs_deepspeed
def test_our_engine_goes_on_from_its_checkpoint(pair: Group, make: Make) -> None:
    case = {"zero": 2}
    job = make("moving", "deepspeed", data=2, **case)
    pair.run(run_fields, job.model_dump(mode="json"), {"stop_after": 2})
    with pytest.raises(UserError, match=r"does not resume runs; set engine to tightfit to go on from .*step-00000002"):
        run_job(make("moving", "deepspeed", data=1, zero=0, levers={"offload": "optimizer"}), resume=True, quiet=True)
    alone(make, "moving", case, resume=True)
    assert_same_run(job.output, alone(make, "straight", case))


@needs_deepspeed
def test_zero_3_lets_go_of_weights(pair: Group, make: Make) -> None:
    """Between steps DeepSpeed has small matrices (64 × 320) at hand, and no large one; under ZeRO-2 it has all."""
    fields = [make(f"zero-{zero}", "deepspeed", data=2, zero=zero).model_dump(mode="json") for zero in (2, 3)]
    assert pair.run(largest_held, fields[0]) == [320 * 512] * 2
    assert pair.run(largest_held, fields[1]) == [64 * 320] * 2


def largest_held(fields: Fields) -> int:
    """Elements of the largest parameter that has memory after a step."""
    job = Job.model_validate(fields)
    mesh = make_mesh(job.layout, "cpu")
    prepared = prepare(job, None, lambda _: None, show_bars=False, device=torch.device("cpu"), mesh=mesh)
    batches, ranks = list(islice(prepared.loader, job.accumulation)), prepared.ranks
    train_step(prepared.module, prepared.optimizer, batches, prepared.device, 1e-3, prepared.scale, ranks=ranks)
    return max(parameter.numel() for parameter in prepared.model.parameters())


@needs_deepspeed
def test_the_configuration_is_the_plan_s_export() -> None:
    pins = ("layout.data=8", "layout.zero=3", "levers.offload=none", "levers.tiles=1")
    plan = planned("llama-3.1-8b", "8xH100-80GB", 4096, 64, *pins).plan
    overrides = ["data.train=x", "output=y", "steps=1", "engine=deepspeed"]
    job = job_of_plan(plan, "plan.json", overrides)
    found = DeepSpeedModule.configuration(job, Workload.of_job(job, plan.workload.spec, "bf16"))
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(deepspeed_config(plan)))
    assert found["zero_optimization"]["stage"] == 3


JOB = "{model: tiny-llama, data: x, output: y, steps: 1, engine: deepspeed, precision: fp32, "
REFUSED = {
    "layout: {data: 2, zero: 1, tensor: 2}}": r"layout.tensor is 2, but DeepSpeed splits over data ranks only",
    "layout: {data: 2, zero: 1, pipeline: 2}}": r"layout.pipeline is 2, .*; set engine to tightfit",
    "layout: {data: 4, zero: 3, shard_inside: 2}}": r"layout.shard_inside is 2",
    "layout: {data: 2}}": r"layout.zero is 0 .*; set layout.zero to 1, 2 or 3, or engine to tightfit",
    "layout: {data: 2, zero: 2}, precision: pure-bf16}": r"precision is pure-bf16, .*; set precision to bf16",
    "layout: {data: 2, zero: 2}, levers: {optimizer_states: 8bit}}": r"levers.optimizer_states is 8bit, which",
    "layout: {data: 2, zero: 2}, levers: {matmul: fp8-row}}": r"levers.matmul is fp8-row, .* or set engine to tightfit",
}


@pytest.mark.parametrize(("end", "sentence"), REFUSED.items(), ids=list(REFUSED))
def test_what_it_cannot_do_is_refused(end: str, sentence: str) -> None:
    text = JOB.replace(" precision: fp32,", "") if "precision" in end else JOB
    with pytest.raises(UserError, match=sentence) as caught:
        parse_job(text + "global_batch: 8, " + end.replace("layout: {", "layout: {micro_batch: 1, "), "job.yaml")
    assert "\n" not in str(caught.value)


def test_a_missing_package_gets_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(
        UserError, match=r"engine is deepspeed, which is not installed; run `DS_BUILD_OPS=0 pip install"
    ):
        load_deepspeed(torch.device("cpu"))


@pytest.mark.thorough
@needs_deepspeed
def test_one_process_keeps_the_optimizer_on_the_host_and_prints_nothing_else(make: Make, tmp_path: Path) -> None:
    """As a program: its own import of DeepSpeed, no launcher, and clean JSON on stdout."""
    job = make("single", "deepspeed", data=1, zero=0, levers={"offload": "optimizer"})
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(job.model_dump(mode="json")))
    code, said, told = run_forked(tmp_path, "train", str(file), "--json")
    assert code == 0, told
    assert json.loads(said)["step"] == STEPS
    assert_same_run(job.output, alone(make, "ours", {"zero": 0}))
