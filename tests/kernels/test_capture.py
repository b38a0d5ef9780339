"""While a graph is captured nothing is collected: a graph that is freed then would end the capture."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tightfit.kernels.capture import capturing


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
