"""Adapters on the GPU: gradients on packed weights in bf16, and a step's memory as formulas and rehearsal say."""

import gc
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tightfit.jobs.adapter import AdapterTraining
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.levers.adapter import adapters, attach, frozen_linears, initialise
from tightfit.memory.formulas.training import training_ledger
from tightfit.models.decoder import Decoder, Implementations
from tightfit.models.huggingface.adapter import LowRank
from tightfit.models.initialisation import init_weights
from tightfit.models.layers.linear_plus_adapter import LinearPlusAdapter
from tightfit.models.presets import preset
from tightfit.models.quantized.directory import replace_module
from tightfit.models.quantized.holding import hold_in_codes
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.prove.rehearsal import build, rehearse
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.weights.adapted import AdaptedWeight
from tightfit.serve.weights.joint import join
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


def beside_packed(dtype: torch.dtype) -> Decoder:
    """Two layers in four bits with adapters on all but k and up."""
    torch.manual_seed(0)
    model = Decoder(replace(preset("llama-3.2-1b"), layers=2, vocab_size=1024)).to(CUDA)
    init_weights(model, device=CUDA)
    assert SETTINGS.held is not None
    hold_in_codes(model.to(dtype), SETTINGS.held, CUDA)
    for name, layer in list(frozen_linears(model)):
        if isinstance(layer, QuantizedLinear) and not name.endswith((".k", ".up")):
            down = torch.randn(16, layer.in_features, device=CUDA, dtype=dtype) / layer.in_features**0.5
            up = 0.05 * torch.randn(layer.out_features, 16, device=CUDA, dtype=dtype)
            replace_module(model, f"{name}.weight", LinearPlusAdapter(layer, LowRank(down, up)))
    return model


@pytest.mark.parametrize("rows", [1, 2, 16, 300])
def test_joint_weights_with_adapters_multiply_as_their_sum(rows: int) -> None:
    """No further from float32 than the layers apart are, but for a quarter."""
    attention: Any = beside_packed(torch.bfloat16).layers[0].attention
    layers = (attention.q, attention.k, attention.v)
    whole = torch.cat([layer.dequantize(torch.float32) for layer in layers])
    x = torch.randn(rows, whole.shape[1], device=CUDA).bfloat16()
    with torch.no_grad():
        apart = torch.cat([layer(x) for layer in layers], dim=-1)
    joint, truth = join(layers), x.float() @ whole.T
    assert isinstance(joint, AdaptedWeight)
    error, allowed = ((made.float() - truth).norm() for made in (joint.product(x), apart))
    assert error <= 1.25 * allowed


def test_an_engine_over_packed_weights_with_adapters_answers_as_over_their_sum() -> None:
    """In float32, in captured steps and one after the other."""
    packed, plain = beside_packed(torch.float32), beside_packed(torch.float32)
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, LinearPlusAdapter | QuantizedLinear) and not name.endswith(".base"):
            linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device=CUDA)
            linear.weight.data.copy_(layer.dequantize(torch.float32))
            replace_module(plain, f"{name}.weight", linear)
    asked = [
        Request(id=str(i), prompt=[5, 17, 3 + i], sampling=Sampling(max_tokens=24, temperature=0)) for i in range(3)
    ]
    said = []
    for model, graphs in ((plain, True), (packed, True), (packed, False)):
        config = EngineConfig(max_sequences=4, max_length=128, cache_bytes=2**24, graphs=graphs)
        made = Engine(model, None, config).generate(asked)
        said.append([made[request.id][0].tokens for request in asked])
    assert said[0] == said[1] == said[2]


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
