"""Measured ledgers: exact where bytes can be counted, equal to what autograd keeps, and read from a GPU's history."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.jobs import tiny_job
from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.jobs.levers import Levers
from tightfit.memory.allocator import PlainAllocator
from tightfit.memory.ledger import Ledger
from tightfit.memory.measurement import Measuring, measured, replay_of_history, running_totals
from tightfit.memory.trace import Allocation
from tightfit.memory.tracing import Tracer
from tightfit.prove.measured_run import MeasuredRun, measure_job
from tightfit.train.loop import run_job
from tightfit.train.metrics import read_metrics
from tightfit.train.preparation import Prepared, prepare
from tightfit.train.step import accumulate

MIB = 2**20
CPU = torch.device("cpu")
STEP_PHASES = ("forward", "loss", "backward", "optimizer")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Job:
    """One micro-batch a step."""
    return tiny_job(tmp_path_factory.mktemp("measured") / "run", corpus, token_cache, layout={"micro_batch": 4})


@pytest.fixture(scope="module")
def found(job: Job) -> MeasuredRun:
    return measure_job(job, 2, quiet=True)


def prepared(job: Job) -> Prepared:
    return prepare(job, None, lambda _: None, show_bars=False, device=CPU, mesh=None)


def held(ledger: Ledger, component: str, phase: Any, detail: str | None = None) -> int:
    return sum(
        line.bytes
        for line in ledger.at(phase, place="host")
        if line.component == component and detail in (None, line.detail)
    )


def test_tensors_on_no_device_take_no_memory() -> None:
    with Tracer() as tracer:
        shapes = torch.empty(1000, device="meta")
        tracer.claim([shapes], "weights")
        made = torch.empty_like(shapes, device="cpu")
    assert tracer.trace.replay(PlainAllocator(), steps=1).peak_allocated_bytes == made.nbytes


def test_states_are_exactly_the_bytes_they_must_be(job: Job, found: MeasuredRun) -> None:
    model = prepared(job).model
    count, tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    assert count == found.params
    for phase in STEP_PHASES:
        assert held(found.ledger, "weights", phase) == 4 * count
        assert held(found.ledger, "optimizer states", phase, "") == 2 * 4 * count
        assert held(found.ledger, "optimizer states", phase, "step counters") == 4 * tensors
    assert held(found.ledger, "gradients", "optimizer", "") == 4 * count
    assert held(found.ledger, "gradients", "forward", "") == 0, "gradients are dropped after every step"


def test_masters_in_mixed_precision(tmp_path: Path, corpus: Path, token_cache: Path) -> None:
    job = tiny_job(tmp_path / "run", corpus, token_cache, precision="bf16", layout={"micro_batch": 4})
    ledger = measure_job(job, 1, quiet=True).ledger
    count = sum(p.numel() for p in prepared(job).model.parameters())
    sizes = {"weights": 2, "master weights": 4, "optimizer states": 8}
    assert {name: held(ledger, name, "optimizer", "") for name in sizes} == {n: b * count for n, b in sizes.items()}
    assert held(ledger, "gradients", "backward", "") <= 2 * count


def kept_by_autograd(p: Prepared) -> int:
    """Bytes of all storages saved for backward before the loss begins, apart from weights and tokens."""
    batch = next(iter(p.loader))
    own = {t.untyped_storage().data_ptr() for t in (*p.model.parameters(), *batch.values())}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []
    inside = True

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no other storage gets its address
        return tensor

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False

    handle = p.model.norm.register_forward_hook(leave)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        accumulate(p.module, [batch], CPU)
    handle.remove()
    return sum(kept.values())


def held_by_forward(p: Prepared, checkpointed: bool) -> int:
    """What is alive at the loss without autograd: its input, positions, the mean; inputs and tables of recomputed
    layers, which wait outside of autograd's graph."""
    spec, rows, length = p.model.spec, p.job.layout.micro_batch, p.job.data.sequence_length
    hidden, positions, mean = 4 * rows * length * spec.hidden_size, 8 * length, 4
    tables = 2 * 4 * length * (spec.head_dim // 2)
    return hidden + positions + mean + (tables + spec.layers * hidden if checkpointed else 0)


@pytest.mark.parametrize("every", [0, 1])
def test_activations_are_what_autograd_keeps(every: int, tmp_path: Path, corpus: Path, token_cache: Path) -> None:
    job = tiny_job(tmp_path / "run", corpus, token_cache, layout={"micro_batch": 4}, levers={"checkpoint_every": every})
    job = job.model_copy(update={"data": job.data.model_copy(update={"separate_documents": False})})
    ledger, again = measure_job(job, 1, quiet=True).ledger, prepared(job)
    kept = kept_by_autograd(again)
    assert kept > 60_000
    assert held(ledger, "activations", "loss") == kept + held_by_forward(again, checkpointed=bool(every))


def test_the_ledger_file_is_a_ledger_and_nothing_else_is_written(job: Job, found: MeasuredRun) -> None:
    file = found.save()
    assert [path.name for path in job.output.iterdir()] == [file.name] == ["ledger.json"]
    data = json.loads(file.read_text())
    assert Ledger.from_json(data, "here") == found.ledger
    assert data["peak_allocated_bytes"] == found.ledger.peak_allocated_bytes("host")
    assert data["steps"] == 2
    assert {line.phase for line in found.ledger.lines} == {"init", *STEP_PHASES, "evaluation"}
    assert all(
        line.bytes > 0 and line.component not in ("allocator slack", "cuda context") for line in found.ledger.lines
    )


def test_inputs_are_the_batch(job: Job, found: MeasuredRun) -> None:
    batch = next(iter(prepared(job).loader))
    assert held(found.ledger, "inputs", "backward") == sum(t.untyped_storage().nbytes() for t in batch.values())


def test_the_largest_tensors_are_part_of_the_peak(found: MeasuredRun) -> None:
    sizes = [kind.bytes * count for kind, count in found.largest]
    assert sizes == sorted(sizes, reverse=True)
    assert 0.5 * found.measuring.fullest.allocated_bytes < sum(sizes) <= found.measuring.fullest.allocated_bytes
    layers = [kind for kind, count in found.largest if kind.module.startswith("layers.*")]
    assert layers


def test_the_last_step_of_the_replay(found: MeasuredRun) -> None:
    """It begins and ends with weights and states alone, and the run's peak of a steady step is in it."""
    part, replay = found.measuring.last_step, found.measuring.replay
    states = 12 * found.params
    ends = replay.allocated_bytes[part.start], replay.allocated_bytes[part.stop - 1]
    assert all(states <= held_bytes < 1.1 * states for held_bytes in ends)
    assert max(replay.allocated_bytes[part]) == found.ledger.peak_allocated_bytes("host")


def test_losses_are_those_of_training(job: Job, found: MeasuredRun, tmp_path: Path) -> None:
    ran = run_job(job.model_copy(update={"output": tmp_path / "run"}), stop_after=2, quiet=True)
    assert found.losses == [row["loss"] for row in read_metrics(ran.run / "metrics.jsonl") if "loss" in row]


def event(action: str, address: int, size: int, time: float) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "time_us": time}


HISTORY = [
    event("segment_alloc", 0, 2 * MIB, 10),
    event("alloc", 0, 1000, 11),
    event("alloc", 1024, 512, 21),
    event("free_requested", 1024, 512, 22),
    event("free_completed", 1024, 512, 23),
    event("segment_alloc", 4 * MIB, 20 * MIB, 31),
    event("alloc", 4 * MIB, 3 * MIB, 32),
    event("alloc", 1024, 300, 33),
    event("free_completed", 4 * MIB, 3 * MIB, 34),
]


def test_totals_of_a_history_are_in_blocks() -> None:
    assert list(running_totals(HISTORY, 512, MIB)) == [
        (512, 3 * MIB),
        (1536, 3 * MIB),
        (2048, 3 * MIB),
        (2048, 3 * MIB),
        (1536, 3 * MIB),
        (1536, 23 * MIB),
        (1536 + 3 * MIB, 23 * MIB),
        (2048 + 3 * MIB, 23 * MIB),
        (2048, 23 * MIB),
    ]


def test_a_gpu_history_is_attributed_by_address_and_time() -> None:
    """What the tracer saw made at the same place, of the same size, right after; anything else is the kernels'."""
    measuring = Measuring(torch.device("cuda"))
    tracer = measuring.tracer
    tracer.phase_times = [(0, "load"), (20, "forward"), (30, "backward")]
    made = [Allocation(1000, "weights"), Allocation(512, "activations", "mlp"), Allocation(3 * MIB, "gradients")]
    for (address, time), allocation in zip([(0, 11.5), (1024, 21.5), (4 * MIB, 32.5)], made, strict=True):
        tracer.births.setdefault(address, []).append((time, tracer.trace.allocate(allocation)))
    replay = replay_of_history(HISTORY, tracer)
    assert replay.starts == [(0, "load"), (2, "forward"), (5, "backward")]
    load, forward, backward = replay.peaks
    assert [(a.component, a.bytes) for a in load.alive] == [("weights", 1024)]
    assert [(a.component, a.bytes) for a in forward.alive] == [("weights", 1024), ("activations", 512)]
    assert [(a.component, a.bytes) for a in backward.alive] == [
        ("weights", 1024),
        ("gradients", 3 * MIB),
        ("workspace", 512),
    ]
    assert (backward.allocated_bytes, backward.reserved_bytes) == (1536 + 3 * MIB, 22 * MIB)


def test_phases_and_steps_of_anything() -> None:
    with measured(CPU) as measuring:
        measuring.tracer.begin("init")
        weights = torch.zeros(1000)
        measuring.tracer.claim([weights], "weights")
        with measuring.step():
            product = weights * 2
            del product
    assert [(line.component, line.phase, line.bytes) for line in measuring.ledger().lines] == [
        ("weights", "init", 4000),
        ("weights", "forward", 4000),
        ("activations", "forward", 4000),
    ]
    assert measuring.replay.allocated_bytes[measuring.last_step] == [8000, 4000]


def test_mistakes_get_a_sentence(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a directory; choose a writable directory"):
        measure_job(job.model_copy(update={"output": tmp_path / "file"}), 1, quiet=True)
    split = {"layout": job.layout.model_copy(update={"tensor": 2}), "levers": Levers(loss="plain")}
    with pytest.raises(UserError, match=r"levers.loss is plain, which needs all logits"):
        measure_job(job.model_copy(update=split), 1, quiet=True)
    exploding = job.optimizer.model_copy(update={"lr": 1e30})
    with pytest.raises(UserError, match=r"lower optimizer.lr \(now 1e\+30\)"):
        measure_job(job.model_copy(update={"optimizer": exploding}), 4, quiet=True)
