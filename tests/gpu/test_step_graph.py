"""A step launched as a CUDA graph is the step launched kernel by kernel, to the bit, in no more memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.kernels.capture import capturing
from tightfit.models.decoder import Implementations
from tightfit.models.presets import preset
from tightfit.models.spec import ModelSpec
from tightfit.prove.rehearsal import Program, build
from tightfit.train.optimizer.backward_update import BackwardUpdate
from tightfit.train.step import NotFiniteError, StepResult, train_step
from tightfit.train.step_graph import StepGraph

CUDA = torch.device("cuda")
LENGTH, ROWS, STEPS = 256, 2, 5
FAMILIES = ["tiny-llama", "tiny-gemma2", "tiny-gpt2", "tiny-qwen3-moe", "tiny-deepseek-v3", "tiny-gpt-oss"]


def program(spec: ModelSpec, *, graph: bool, precision: Any = "bf16", passes: int = 1, **levers: Any) -> Program:
    torch.manual_seed(0)
    workload = Workload(spec=spec, sequence_length=LENGTH, global_batch=ROWS * passes, precision=precision)

    def fill(model: torch.nn.Module) -> None:
        for weight in model.parameters():
            weight.data.normal_(std=0.02) if weight.ndim > 1 else weight.data.fill_(1.0)

    chosen = Levers(cuda_graph="always" if graph else "never", **levers)
    made = build(workload, Layout(micro_batch=ROWS), chosen, CUDA, Implementations(), fill=fill)
    assert (made.graph is not None) is graph
    return made


def batches(step: int, spec: ModelSpec, passes: int, *, packed: bool = False) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    made = []
    for _ in range(passes):
        tokens = torch.randint(spec.vocab_size, (ROWS, LENGTH), generator=generator)
        labels = tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.1, -100)
        made.append({"tokens": tokens, "labels": labels})
        if packed:
            ends = torch.rand(tokens.shape, generator=generator) < 0.02
            made[-1]["documents"] = ends.cumsum(1)
    return made


def steps(made: Program, spec: ModelSpec, passes: int, *, packed: bool = False) -> list[StepResult]:
    found = []
    for step in range(STEPS):
        given = batches(step, spec, passes, packed=packed)
        found.append(
            train_step(made.module, made.optimizer, given, CUDA, 1e-3, made.scale, ranks=made.ranks, graph=made.graph)
        )
    return found


def assert_same(spec: ModelSpec, *, passes: int = 1, packed: bool = False, **settings: Any) -> None:
    plain, captured = (program(spec, graph=graph, passes=passes, **settings) for graph in (False, True))
    expected, found = (steps(made, spec, passes, packed=packed) for made in (plain, captured))
    assert captured.graph is not None
    assert captured.graph.is_captured
    assert found == expected
    theirs, ours = plain.optimizer.state(), captured.optimizer.state()
    assert [name for name in theirs if not torch.equal(theirs[name], ours[name])] == []
    pairs = zip(plain.decoder.parameters(), captured.decoder.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, passes: int) -> None:
    assert_same(preset(family), passes=passes)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "pure-bf16"])
def test_precisions(precision: str) -> None:
    assert_same(preset("tiny-llama"), passes=2, precision=precision)


@pytest.mark.parametrize(
    "levers",
    [
        {"checkpoint_every": 1},
        {"checkpoint_every": 2, "checkpoint_keep": "attention"},
        {"checkpoint_every": 1, "checkpoint_keep": "matmuls"},
        {"tiles": 4},
        {"loss": "plain"},
        {"matmul": "fp8-tensor"},
        {"matmul": "fp8-row"},
        {"optimizer_states": "8bit"},
        {"optimizer_states": "factored"},
    ],
    ids=lambda levers: " ".join(f"{name}={value}" for name, value in levers.items()),
)
def test_levers(levers: dict[str, Any]) -> None:
    assert_same(preset("tiny-llama"), passes=2, **levers)


def test_packed_documents() -> None:
    assert_same(preset("tiny-llama"), passes=2, packed=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_updates_inside_backward(family: str) -> None:
    assert_same(preset(family), update_in_backward=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp32"},
        {"precision": "pure-bf16"},
        {"optimizer_states": "8bit"},
        {"checkpoint_every": 1},
        {"matmul": "fp8-tensor"},
        {"packed": True},
    ],
    ids=str,
)
def test_updates_inside_backward_with(changes: dict[str, Any]) -> None:
    assert_same(preset("tiny-llama"), update_in_backward=True, **changes)


def test_a_loss_that_is_not_finite_updates_nothing_inside_backward() -> None:
    spec = preset("tiny-llama")
    made = program(spec, graph=True, update_in_backward=True)
    steps(made, spec, 1)
    assert made.graph is not None
    assert made.graph.is_captured
    weights = list(made.decoder.parameters())
    kept = weights[-1].data.clone()
    weights[-1].data.fill_(torch.nan)
    before = [weight.clone() for weight in weights]
    states = {name: state.clone() for name, state in made.optimizer.state().items()}
    with pytest.raises(NotFiniteError):
        train_step(made.module, made.optimizer, batches(9, spec, 1), CUDA, 1e-3, made.scale, graph=made.graph)
    assert made.graph.is_captured
    assert all(torch.equal(a, b) for a, b in zip(before[:-1], weights[:-1], strict=True))
    assert all(torch.equal(state, states[name]) for name, state in made.optimizer.state().items())
    weights[-1].data.copy_(kept)
    train_step(made.module, made.optimizer, batches(9, spec, 1), CUDA, 1e-3, made.scale, graph=made.graph)
    assert all(not torch.equal(a, b) for a, b in zip(before[:-1], weights[:-1], strict=True))


def test_random_numbers_are_drawn_after_a_capture_that_failed() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(4, device=CUDA)
    torch.manual_seed(3)
    with pytest.raises(RuntimeError), capturing(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device=CUDA).item()
    assert torch.equal(torch.rand(4, device=CUDA), wanted)


def test_an_update_that_cannot_be_captured_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = preset("tiny-llama")
    plain, made = (program(spec, graph=graph, update_in_backward=True) for graph in (False, True))
    finish = BackwardUpdate.finish

    def fails(self: BackwardUpdate) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("on purpose")
        return finish(self)

    monkeypatch.setattr(BackwardUpdate, "finish", fails)
    expected = steps(plain, spec, 1)
    with pytest.warns(UserWarning, match="on purpose"):
        assert steps(made, spec, 1) == expected
    assert made.optimizer.counts == plain.optimizer.counts


def test_a_step_unlike_the_one_before_is_launched_kernel_by_kernel() -> None:
    spec = preset("tiny-llama")
    kinds = [False, False, True, False, False, True, True]
    results = []
    for graph in (False, True):
        made, seen = program(spec, graph=graph), []
        found = []
        for step, packed in enumerate(kinds):
            given = batches(step, spec, 1, packed=packed)
            found.append(train_step(made.module, made.optimizer, given, CUDA, 1e-3, made.scale, graph=made.graph))
            seen.append(made.graph is not None and made.graph.is_captured)
        results.append(found)
    assert seen == [False, True, False, False, True, False, True]
    assert results[0] == results[1]


def test_loads_of_experts_are_counted() -> None:
    spec = preset("tiny-qwen3-moe")
    loads = []
    for graph in (False, True):
        made = program(spec, graph=graph, passes=2)
        steps(made, spec, 2)
        layers: Any = made.decoder.layers
        loads.append([layer.mlp.load.tolist() for layer in layers])
    assert loads[0] == loads[1]


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    spec = preset("tiny-llama")
    made = program(spec, graph=True)
    steps(made, spec, 1)
    weights = list(made.decoder.parameters())
    weights[-1].data.fill_(torch.nan)
    before = [weight.clone() for weight in weights]
    with pytest.raises(NotFiniteError):
        steps(made, spec, 1)
    assert all(torch.equal(a, b) for a, b in zip(before[:-1], weights[:-1], strict=True))
    assert all(weight.grad is None for weight in weights)


def test_memory_is_given_back_and_no_more_is_taken() -> None:
    spec = replace(preset("tiny-llama"), layers=8)
    peaks = []
    for graph in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        made = program(spec, graph=graph)
        steps(made, spec, 1)
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        if made.graph is not None:
            held = torch.cuda.memory_allocated()
            made.graph.release()
            assert torch.cuda.memory_allocated() < held
            steps(made, spec, 1)
        del made
    assert peaks[1][0] <= 1.02 * peaks[0][0]


def test_a_graph_that_does_not_fit_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = preset("tiny-llama")
    made = program(spec, graph=True)

    def too_much(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(StepGraph, "_captured", too_much)
    expected = steps(program(spec, graph=False), spec, 1)
    assert steps(made, spec, 1) == expected
    assert made.graph is not None
    assert not made.graph.is_captured


def test_a_capture_that_fails_at_the_second_micro_batch_counts_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, loads, capture = preset("tiny-qwen3-moe"), [], StepGraph._captured
    captures = 0

    def fail_second(graph: StepGraph, places: Any) -> torch.cuda.CUDAGraph:
        nonlocal captures
        captures += 1
        if captures == 2:
            raise torch.OutOfMemoryError("no room for a second graph")
        return capture(graph, places)

    monkeypatch.setattr(StepGraph, "_captured", fail_second)
    for graph in (False, True):
        made = program(spec, graph=graph, passes=2)
        steps(made, spec, 2)
        layers: Any = made.decoder.layers
        loads.append([layer.mlp.load.tolist() for layer in layers])
    assert captures == 2
    assert loads[0] == loads[1]
