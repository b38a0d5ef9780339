"""Adapters on the GPU: gradients on packed weights in bf16, and a step's memory as formulas and rehearsal say."""

import gc
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from tightfit.jobs.adapter import AdapterTraining
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.levers.adapter import adapters, attach, frozen_linears, initialise
from tightfit.memory.formulas.training import training_ledger
from tightfit.models.decoder import Decoder, Implementations
from tightfit.models.initialisation import init_weights
from tightfit.models.presets import preset
from tightfit.models.quantized.holding import hold_in_codes
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.prove.rehearsal import build, rehearse
from tightfit.train.step import ignore

CUDA = torch.device("cuda")
SETTINGS = AdapterTraining(rank=8, bits=4)


def gradients(model: Decoder, tokens: torch.Tensor) -> list[torch.Tensor]:
    attach(model, SETTINGS, model.embed.weight.dtype)
    initialise(model, 0)
    with torch.no_grad():
        for _, b in adapters(model).values():
            b.copy_(0.02 * torch.randn(b.shape, generator=torch.Generator().manual_seed(b.numel())))
    loss = model(tokens, labels=tokens.roll(-1, 1)).loss
    assert loss is not None
    loss.backward()
    found = [matrix.grad for both in adapters(model).values() for matrix in both]
    return [gradient.float() for gradient in found if gradient is not None]


@pytest.mark.parametrize("tokens", [64, 1024])
def test_packed_weights_have_the_gradients_of_expanded_ones(tokens: int) -> None:
    """No further from float32 on expanded weights than bf16 on expanded weights is, but for a quarter."""
    torch.manual_seed(0)
    wide = Decoder(replace(preset("llama-3.2-1b"), layers=2, vocab_size=1024)).to(CUDA)
    init_weights(wide, device=CUDA)
    packed = deepcopy(wide).to(torch.bfloat16)
    scheme = SETTINGS.held
    assert scheme is not None
    hold_in_codes(packed, scheme, CUDA)
    with torch.no_grad():
        for name, layer in frozen_linears(packed):
            assert isinstance(layer, QuantizedLinear)
            wide.get_parameter(f"{name}.weight").copy_(layer.dequantize(torch.float32))
    narrow = deepcopy(wide).to(torch.bfloat16)
    batch = torch.randint(1024, (1, tokens), device=CUDA)
    truth, found, plain = (gradients(model, batch) for model in (wide, packed, narrow))
    assert len(truth) == len(found) == 28
    for wanted, one, other in zip(truth, found, plain, strict=True):
        error, allowed = ((each - wanted).norm() for each in (one, other))
        assert error <= 1.25 * allowed + 1e-6


@pytest.mark.parametrize(
    ("settings", "levers"),
    [
        ({"rank": 16, "bits": 4}, {"checkpoint_every": 1}),
        ({"rank": 16, "bits": 4}, {}),
        ({"rank": 16}, {"checkpoint_every": 1}),
        ({"rank": 16, "bits": 4}, {"checkpoint_every": 1, "tiles": 4}),
    ],
)
def test_a_step_takes_what_was_predicted(settings: dict[str, Any], levers: dict[str, Any]) -> None:
    spec, layout, given = replace(preset("llama-3.1-8b"), layers=4), Layout(micro_batch=1), Levers(**levers)
    adapted = AdapterTraining.model_validate(settings).adapted()
    workload = Workload(spec=spec, sequence_length=4096, global_batch=1, precision="bf16", adapted=adapted)
    said = training_ledger(workload, layout, given).peak_allocated_bytes()
    simulated = rehearse(workload, layout, given).peak_allocated_bytes()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    program = build(workload, layout, given, CUDA, Implementations(), fill=lambda model: initialise(model, 0))
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        program.step(ignore)
    measured = torch.cuda.max_memory_allocated()
    assert simulated == pytest.approx(measured, rel=0.02)
    assert said == pytest.approx(measured, rel=0.03)
