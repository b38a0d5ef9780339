"""Formulas of layers in tiles against what autograd keeps and against the real step on fake tensors."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.covering import sampled
from tests.memory.test_formulas_layer import LENGTH, ROWS, Saved, decoder
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.levers import tiling
from tightfit.memory.formulas.fsdp2 import installed
from tightfit.memory.formulas.layer import layer_kept
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.overheads import Overheads
from tightfit.memory.formulas.training import training_ledger
from tightfit.models.presets import preset
from tightfit.plan.search.lever_choices import TILED_LENGTH
from tightfit.prove.rehearsal import rehearse

CASES: list[tuple[str, int, dict[str, Any], str]] = [
    ("llama-3.1-8b", 8192, {"tiles": 4}, "pure-bf16"),
    ("llama-3.1-8b", 65536, {"tiles": 16, "checkpoint_every": 1}, "pure-bf16"),
    ("llama-3.1-8b", 16384, {"tiles": 4, "checkpoint_every": 1, "checkpoint_keep": "attention"}, "bf16"),
    ("qwen3-8b", 8192, {"tiles": 4}, "fp32"),
]


@sampled(2)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3", "tiny-gemma2", "tiny-gpt2"])
def test_one_layer_keeps_what_autograd_keeps(name: str) -> None:
    spec, tiles = preset(name), 4
    model = decoder(spec, torch.float16)
    tiling.tile_layers(model, Levers(tiles=tiles))
    x = torch.randn(ROWS, LENGTH, spec.hidden_size, dtype=torch.float16, requires_grad=True)
    ctx = model.forward_context(x, torch.arange(LENGTH)[None], None, None)
    with Saved(model).watching() as saved:
        made, _ = model.layers[0](x * 1.0, ctx)
    assert made.shape == x.shape
    shape = LocalShape(spec, ROWS, LENGTH, 2, tiles=tiles)
    assert saved.bytes == sum(kept.bytes for kept in layer_kept(shape, 0))


@sampled(2)
@pytest.mark.parametrize(("model", "length", "levers", "precision"), CASES)
def test_the_peak_is_the_simulations(model: str, length: int, levers: dict[str, Any], precision: Any) -> None:
    spec = replace(preset(model), layers=3, vocab_size=4096)
    workload = Workload(spec=spec, sequence_length=length, global_batch=1, precision=precision)
    layout, given = Layout(micro_batch=1), Levers.model_validate(levers)
    found = training_ledger(workload, layout, given, Overheads(context_bytes=0, slack_share=0, fsdp2=installed()))
    truth = rehearse(workload, layout, given)
    assert found.peak_allocated_bytes() == pytest.approx(truth.peak_allocated_bytes(), rel=0.01)
    for phase in ("forward", "loss", "backward", "optimizer"):
        assert found.allocated_bytes(phase) == pytest.approx(truth.allocated_bytes(phase), rel=0.06), phase
    whole = rehearse(workload, layout, given.model_copy(update={"tiles": 1}))
    assert truth.allocated_bytes("backward") < whole.allocated_bytes("backward")


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "gemma-2-9b", "qwen3-8b"])
@pytest.mark.parametrize("every", [0, 1])
def test_tiles_save_from_the_length_on_that_the_planner_tries_them(name: str, every: int) -> None:
    peaks = []
    for tiles in (1, 8):
        spec = replace(preset(name), max_positions=TILED_LENGTH)
        workload = Workload(spec=spec, sequence_length=TILED_LENGTH, global_batch=1, precision="bf16")
        levers = Levers(tiles=tiles, checkpoint_every=every)
        peaks.append(training_ledger(workload, Layout(micro_batch=1), levers).peak_allocated_bytes())
    assert peaks[1] <= peaks[0]
