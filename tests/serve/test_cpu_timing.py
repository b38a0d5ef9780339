"""What steps take on this CPU, measured part by part: what is predicted from it is of the order of what is measured."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.serve_predicted import processor_seconds
from tests.serve.conftest import SHAPE
from tests.serve.little_timing import measure_little
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.serve import cpu_timing
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.load import measured_rates, predicted_seconds

TIMES = 2.5
"""What it said before was up to five times too fast."""
TRIES = 3


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Of a model whose products take as long as its calls."""
    torch.manual_seed(0)
    model = Decoder(replace(SHAPE, hidden_size=256, heads=8, kv_heads=4, head_dim=32, mlp_size=1024, layers=4))
    init_weights(model)
    return Engine(model, None, EngineConfig(max_sequences=16, prefix_cache=False, cache_bytes=2**24))


@pytest.mark.thorough  # how near it comes depends on the CPU's caches: its own rows are in docs/serving.md
@pytest.mark.parametrize("at_once", [1, 16])
def test_predictions_are_of_the_order_of_what_is_measured(
    engine: Engine, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processor time of one thread, which others' work hardly adds to; once more where a measurement slipped."""
    measure_little(monkeypatch)
    monkeypatch.setattr(cpu_timing, "OUTPUTS", 1024)
    monkeypatch.setattr(cpu_timing, "INPUTS", 256)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(TRIES):
            rates = measured_rates(engine)
            processor_seconds(engine, at_once, 48, 2)
            measured = processor_seconds(engine, at_once, 48, 8)
            told = predicted_seconds(engine, rates, at_once, 48, 8)
            ratios = [one / other for one, other in zip(told, measured, strict=True)]
            if all(1 / TIMES < ratio < TIMES for ratio in ratios):
                return
    finally:
        torch.set_num_threads(threads)
    pytest.fail(f"predicted beside measured: {ratios}")


def test_a_product_is_measured_at_several_places_of_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest counts: at some places one row took twice as long, and all that is told of a CPU with it."""
    places: list[int] = []

    class Watched:
        def product(self, x: torch.Tensor) -> None:
            places.append(x.data_ptr())

    taken = iter((3.0, 1.0, 2.0))

    def best_s(do: Callable[[], object]) -> float:
        do()
        return next(taken)

    monkeypatch.setattr(cpu_timing, "_best_s", best_s)
    weights: Any = [Watched(), Watched()]
    found = cpu_timing._product_ns(weights, 2)
    assert found == pytest.approx(1e9 / (2 * cpu_timing.OUTPUTS * cpu_timing.INPUTS))
    assert (len(places), len(set(places))) == (2 * cpu_timing.PLACES, cpu_timing.PLACES)
