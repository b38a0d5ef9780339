"""While a graph is captured nothing is collected: a graph that is freed then would end the capture.

And random numbers are drawn after one that failed, where torch would refuse; constants are kept with the graph.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tightfit.kernels.capture import capturing, graph_constant


class Generator:
    """As much of torch's as a capture asks for."""

    state = "before"

    def clone_state(self) -> str:
        return self.state

    def graphsafe_set_state(self, state: str) -> None:
        self.state = state


@pytest.fixture(autouse=True)
def generator(monkeypatch: pytest.MonkeyPatch) -> Generator:
    made = Generator()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (made,))
    return made


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch's capture is begun with, and whether garbage is collected when it begins and ends."""
    seen: list[Any] = []

    @contextmanager
    def graph(given: Any, **options: Any) -> Iterator[None]:
        seen.append((given, options, gc.isenabled()))
        try:
            yield
        finally:
            seen.append(gc.isenabled())

    monkeypatch.setattr(torch.cuda, "graph", graph)
    return seen


def test_nothing_is_collected_inside(states: list[Any]) -> None:
    with capturing("a graph", pool="a pool"):  # type: ignore[arg-type]
        assert not gc.isenabled()
    assert gc.isenabled()
    assert states == [("a graph", {"pool": "a pool"}, False), False]


@pytest.mark.parametrize("on", [True, False])
def test_collections_are_what_they_were_before(states: list[Any], on: bool) -> None:
    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="during capture"), capturing("a graph"):  # type: ignore[arg-type]
            raise RuntimeError("during capture")
        assert gc.isenabled() == on
    finally:
        gc.enable()


def test_the_generator_has_its_state_of_before_after_a_capture_that_failed(
    states: list[Any], generator: Generator
) -> None:
    with capturing("a graph"):  # type: ignore[arg-type]
        generator.state = "captured"
    assert generator.state == "captured", "as torch left it"
    generator.state = "before"

    def fails() -> None:
        generator.state = "captured"
        raise RuntimeError("during capture")

    with pytest.raises(RuntimeError), capturing("a graph"):  # type: ignore[arg-type]
        fails()
    assert generator.state == "before"


def test_what_is_sent_during_a_capture_stays_with_the_graph(states: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        constants: list[torch.Tensor]

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    values, threads = torch.arange(3), set()

    class Values:
        def to(self, device: object) -> torch.Tensor:
            threads.add(threading.get_ident())
            return values

    graph: Any = Graph()
    with capturing(graph):
        there = graph_constant(Values(), torch.device("cuda"))  # type: ignore[arg-type]
    assert graph.constants == [there]
    assert threads
    assert threading.get_ident() not in threads, "the thread that captures may not copy"
    assert graph_constant(values, torch.device("cpu")) is values
