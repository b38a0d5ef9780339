"""What the host does around the graph of a step that updates inside backward: counts, numbers, failures.

A graph needs a GPU (tests/gpu/test_step_graph.py); in its place stands one that launches the step when it is replayed.
"""

from typing import Any

import pytest
import torch

from tests.train.models import TINY, ragged_batch, tiny_model
from tightfit.jobs.job import Optimizer
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.models.decoder import Decoder
from tightfit.train import step_graph
from tightfit.train.assembly import assemble
from tightfit.train.optimizer.adamw import MasterAdamW
from tightfit.train.precision import LossScale
from tightfit.train.step import NotFiniteError, StepResult, objective, train_step
from tightfit.train.step_graph import UpdatingStepGraph

CPU = torch.device("cpu")
RATES = (1e-2, 1e-2, 5e-3, 2e-3, 1e-3)


class LaunchedStep:
    """Launches a step that was "captured"."""

    def __init__(self, graph: UpdatingStepGraph, places: Any) -> None:
        self.graph, self.places = graph, places

    def replay(self) -> None:
        """Matrices read their numbers from memory; of vectors torch's AdamW counts and is told the rate."""
        graph, places = self.graph, self.places
        assert graph._numbers is not None
        counts = graph.optimizer.counts
        with graph.optimizer.reading_numbers(graph._numbers):
            graph.updates.begin(float(places.share) * RATES[graph.optimizer.counts[0][0]])
            output = graph.model(**places.arguments, divisor=places.divisor)
            graph.updates.skip_unless_finite(output.loss.detach())
            objective(output, places.share).backward()
            places.norm.copy_(graph.updates.finish())
            places.loss.copy_(output.loss.detach())
        graph.optimizer.counts = counts  # which a graph knows nothing of


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(self: UpdatingStepGraph, places: Any, lr: float) -> LaunchedStep:
        self.optimizer.counts = [[count + 1 for count in bucket] for bucket in self.optimizer.counts]
        return LaunchedStep(self, places)

    monkeypatch.setattr(UpdatingStepGraph, "_captured_step", captured)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


def made(*, inside: bool = True, l1: float = 0.0) -> tuple[Decoder, MasterAdamW]:
    model, settings = tiny_model(), Optimizer(clip_norm=0.1, l1=l1)
    levers = Levers(update_in_backward=inside)
    return model, assemble(model, None, Layout(), levers, "fp32", settings, CPU, lambda decoder: None)[1]


def graph_of(model: Decoder, optimizer: MasterAdamW) -> UpdatingStepGraph:
    assert optimizer.in_backward is not None
    return UpdatingStepGraph(model, optimizer, optimizer.in_backward, CPU)


def steps(model: Decoder, optimizer: MasterAdamW, graph: UpdatingStepGraph | None) -> list[StepResult]:
    found = []
    for step, lr in enumerate(RATES):
        batch = ragged_batch(4, seed=step)
        found.append(train_step(model, optimizer, [batch], CPU, lr, LossScale(), graph=graph))
    return found


def test_replayed_steps_are_launched_ones() -> None:
    (plain, usual), (model, optimizer) = made(), made()
    graph = graph_of(model, optimizer)
    assert steps(model, optimizer, graph) == steps(plain, usual, None)
    assert graph.is_captured
    assert optimizer.counts == usual.counts == [[len(RATES)] * len(bucket.names) for bucket in usual.buckets]
    theirs = usual.state()
    assert all(torch.equal(state, theirs[name]) for name, state in optimizer.state().items())


def test_a_loss_that_is_not_finite_is_not_counted() -> None:
    model, optimizer = made()
    graph = graph_of(model, optimizer)
    steps(model, optimizer, graph)
    optimizer.counts = [[1 for _ in bucket] for bucket in optimizer.counts]
    weights = list(model.parameters())
    weights[-1].data.fill_(torch.nan)
    before = [weight.detach().clone() for weight in weights[:-1]]
    with pytest.raises(NotFiniteError):
        train_step(model, optimizer, [ragged_batch(4)], CPU, 1e-2, LossScale(), graph=graph)
    assert all(torch.equal(*pair) for pair in zip(before, weights[:-1], strict=True))
    assert all(count == 1 for bucket in optimizer.counts for count in bucket)


def test_what_cannot_be_captured_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (plain, usual), (model, optimizer) = made(), made()

    def fails(self: UpdatingStepGraph, places: Any, lr: float) -> None:
        self.optimizer.counts = [[count + 1 for count in bucket] for bucket in self.optimizer.counts]
        raise RuntimeError("on purpose")

    monkeypatch.setattr(UpdatingStepGraph, "_captured_step", fails)
    graph = graph_of(model, optimizer)
    with pytest.warns(UserWarning, match="on purpose"):
        assert steps(model, optimizer, graph) == steps(plain, usual, None)
    assert optimizer.counts == usual.counts
    assert not graph.is_captured


def test_weights_that_were_updated_differently_often_are_no_graph() -> None:
    model, optimizer = made()
    graph = graph_of(model, optimizer)
    optimizer.counts = [[index] * len(bucket) for index, bucket in enumerate(optimizer.counts)]
    train_step(model, optimizer, [ragged_batch(4)], CPU, 1e-2, LossScale(), graph=graph)
    counts = optimizer.counts
    with pytest.warns(UserWarning, match="have been updated"):
        train_step(model, optimizer, [ragged_batch(4)], CPU, 1e-2, LossScale(), graph=graph)
    assert optimizer.counts == [[count + 1 for count in bucket] for bucket in counts]


def test_which_graph_a_step_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1 shrinks weights by the learning rate, which the host multiplies: no graph with updates inside."""
    monkeypatch.setattr(step_graph, "is_captured", lambda *_: True)
    workload = Workload(spec=TINY, sequence_length=8, global_batch=1)

    def kind(**asked: Any) -> type:
        model, optimizer = made(**asked)
        how = (workload, Layout(), Levers(update_in_backward=asked.get("inside", True)))
        return type(step_graph.step_graph(model, optimizer, torch.device("cuda"), *how))

    assert kind() is UpdatingStepGraph
    assert kind(inside=False) is kind(inside=False, l1=0.1) is step_graph.StepGraph
    assert kind(l1=0.1) is type(None)
