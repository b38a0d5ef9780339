"""Offload on a GPU: streams that overlap change no bit, and memory leaves."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from tightfit.jobs.job import Optimizer
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.levers import state_link
from tightfit.levers.host_update import faster_route
from tightfit.levers.policy.offload import PIECE_ELEMENTS
from tightfit.models.decoder import Implementations
from tightfit.models.initialisation import init_weights
from tightfit.models.spec import ModelSpec
from tightfit.train.assembly import assemble, unfilled
from tightfit.train.precision import LossScale
from tightfit.train.step import train_step

CUDA = torch.device("cuda")
SPEC = ModelSpec(
    family="llama",
    vocab_size=8192,
    hidden_size=1024,
    layers=6,
    heads=8,
    kv_heads=4,
    head_dim=128,
    mlp_size=4096,
    max_positions=4096,
)
STEPS = 6
EVERYTHING = 2**40


def trained(precision: Any, steps: int = STEPS, **levers: Any) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses and norms, weights in host memory, and the peak of allocated memory of the steps."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    chosen = Levers(**{"checkpoint_every": 1, **levers})
    torch.manual_seed(0)
    model = unfilled(SPEC, Layout(), precision, CUDA, chosen)
    model.impl = Implementations(attention="triton")
    for layer in model.layers:
        layer.attention.impl = model.impl  # whose backward adds up in one order
    settings = Optimizer(lr=1e-3)
    _, optimizer = assemble(
        model, None, Layout(), chosen, precision, settings, CUDA, lambda m: init_weights(m, device=CUDA)
    )
    generator, results = torch.Generator().manual_seed(1), []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        tokens = torch.randint(SPEC.vocab_size, (2, 1024), generator=generator)
        batch = {"tokens": tokens, "labels": tokens}
        result = train_step(model, optimizer, [batch], CUDA, 1e-3, LossScale.for_precision(precision))
        results += [result.loss, result.gradient_norm]
    peak = torch.cuda.max_memory_allocated() - before
    assert optimizer.offloading is not None
    held = {name: tensor.cpu() for name, tensor in optimizer.offloading.weights(model).items()}
    return results, held, peak


@pytest.fixture(scope="module")
def stayed() -> dict[Any, Any]:
    return {
        (precision, inside): trained(
            precision, offload="optimizer", offload_keep_bytes=EVERYTHING, update_in_backward=inside
        )
        for precision in ("bf16", "pure-bf16")
        for inside in (False, True)
    }


@pytest.mark.parametrize("pieces", [PIECE_ELEMENTS, 300_000])
@pytest.mark.parametrize("precision", ["bf16", "pure-bf16"])
@pytest.mark.parametrize("offload", ["optimizer", "weights"])
@pytest.mark.parametrize(
    "levers", [{}, {"update_in_backward": True}, {"update_in_backward": True, "offload_gradient_bytes": 0}]
)
def test_streams_change_no_bit(
    stayed: dict[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
    pieces: int,
    precision: str,
    offload: str,
    levers: dict[str, Any],
) -> None:
    """Many small pieces and few large ones; gradients that wait and gradients that may not."""
    monkeypatch.setattr(state_link, "PIECE_ELEMENTS", pieces)
    if "offload_gradient_bytes" in levers:
        monkeypatch.setattr(state_link, "IN_FLIGHT_BYTES", 2**20)
    results, held, peak = trained(precision, offload=offload, **levers)
    wanted, there, most = stayed[precision, "update_in_backward" in levers]
    assert results == wanted
    for name, tensor in held.items():
        assert torch.equal(tensor, there[name]), name
    if pieces == 300_000:
        matrices = sum(t.numel() for t in there.values() if t.ndim > 1)
        states = matrices * (12 if precision == "bf16" else 4)
        assert peak < most - 0.5 * states


@pytest.mark.parametrize("offload", ["optimizer", "weights"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_host_that_updates_differs_by_rounding(offload: str, inside: bool) -> None:
    """One step: from there on differences in the last bit of a gradient become differences in Adam's next sign."""
    levers: dict[str, Any] = {"offload": offload, "update_in_backward": inside, "steps": 1}
    results, held, _ = trained("bf16", **levers, offload_update="host")
    wanted, there, _ = trained("bf16", **levers)
    assert results == wanted
    for name, tensor in held.items():
        assert torch.allclose(tensor.float(), there[name].float(), rtol=2**-7, atol=1e-5), name
        assert (tensor != there[name]).float().mean() < 0.01, name


def test_both_routes_are_measured() -> None:
    route, rates = faster_route(CUDA)
    assert rates[route] == max(rates.values())
    assert all(1e7 < rate < 1e11 for rate in rates.values())
