"""Sequence tiling in bf16 on a real GPU: gradients no worse than whole layers', and less memory at its peak."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tightfit.jobs.levers import Levers
from tightfit.levers.checkpointing import checkpoint_layers
from tightfit.levers.tiling import tile_layers
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.presets import preset
from tightfit.models.spec import ModelSpec

GPU = torch.device("cuda")
SPEC = replace(preset("llama-3.2-1b"), layers=2, vocab_size=512)
SPECS = {
    "llama": SPEC,
    "gemma2": replace(preset("tiny-gemma2"), hidden_size=256, mlp_size=768, layers=2, max_positions=4096),
    "qwen3": replace(preset("tiny-qwen3"), hidden_size=256, mlp_size=768, head_dim=64, max_positions=4096),
}


def gradients(spec: ModelSpec, dtype: torch.dtype, length: int, tiles: int, every: int) -> tuple[float, list[Tensor]]:
    """The loss and all gradients of one sequence."""
    torch.manual_seed(0)
    model = Decoder(spec).to(GPU)
    init_weights(model)
    model = model.to(torch.bfloat16).to(dtype)  # the same weights in both
    tile_layers(model, Levers(tiles=tiles))
    checkpoint_layers(model, Levers(checkpoint_every=every))
    tokens = torch.randint(0, spec.vocab_size, (1, length + 1), device=GPU)
    output = model(tokens[:, :-1], tokens[:, 1:].contiguous(), divisor=float(length))
    assert output.loss is not None
    output.loss.backward()
    return output.loss.item(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("tiles", "every"), [(3, 0), (8, 1)])
def test_gradients_are_no_worse_than_whole_layers(name: str, tiles: int, every: int) -> None:
    spec, length = SPECS[name], 1000
    loss, truth = gradients(spec, torch.float32, length, 1, 0)
    plain_loss, plain = gradients(spec, torch.bfloat16, length, 1, 0)
    tiled_loss, tiled = gradients(spec, torch.bfloat16, length, tiles, every)
    assert abs(tiled_loss - loss) <= 1.5 * abs(plain_loss - loss) + 1e-3
    assert len(truth) == len(tiled) > 10
    for exact, whole, ours in zip(truth, plain, tiled, strict=True):
        errors = [float((made.float() - exact).norm() / exact.norm()) for made in (ours, whole)]
        assert errors[0] <= 1.2 * errors[1] + 2e-3


def test_memory_falls_with_tiles() -> None:
    peaks = []
    for tiles in (1, 4, 16):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(SPEC, torch.bfloat16, 65536, tiles, 1)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 0.7 * peaks[0]
    assert peaks[2] < 0.95 * peaks[1]  # what is left is attention's, which sees the whole sequence
