"""The decoder's forward pass over joint weights: its ways of running a step agree."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.truth import DEVICE, error
from tightfit.kernels.triton_support import is_interpreted
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.resolve import resolve_spec
from tightfit.serve.forward import program
from tightfit.serve.forward.runner import Runner, make_cache
from tightfit.serve.schedule.step import Step
from tightfit.serve.weights.weight import PlainWeight

LENGTHS = [1, 9, 6]
BLOCK_SIZE = 4


@pytest.mark.skipif(not is_interpreted(), reason="tests/gpu/test_serve.py has what a card does")
@pytest.mark.parametrize("changes", [{}, {"norm": "rms_plus_one", "qkv_bias": True}], ids=["llama", "biases"])
def test_norms_inside_products_change_nothing(monkeypatch: pytest.MonkeyPatch, changes: dict) -> None:
    """A decoding step of three sequences, by kernels with norms of their own and without."""
    torch.manual_seed(0)
    model = Decoder(replace(resolve_spec("tiny-llama"), vocab_size=64, **changes))
    init_weights(model, gain=2.0)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    cache = make_cache(model.spec, 9, BLOCK_SIZE, DEVICE, torch.float32)
    torch.nn.init.normal_(cache.storage)
    before = cache.storage.clone()
    runner = Runner(model, cache, 16, 4)
    own = runner.program
    assert own is not None
    assert not own.norms_in_products
    monkeypatch.setattr(program, "suits_few_rows", lambda weight: True)
    assert all(isinstance(weight, PlainWeight) for weight in program._few_token_weights(own.layers[0]))
    own.own_attention, own.on_cpu = True, False
    found = {}
    for is_fused in (False, True):
        own.norms_in_products = is_fused
        cache.storage.copy_(before)
        found[is_fused] = runner.states(step()), cache.storage.clone()
    assert not torch.equal(found[True][0], found[False][0]), "both ran the same kernels"
    assert not torch.equal(found[True][1], before)
    for fused, apart in zip(found[True], found[False], strict=True):
        assert error(fused, apart) < 1e-5


def step() -> Step:
    """One token each of sequences that have LENGTHS of them with it."""
    tables = torch.tensor([[3, 0, 0], [5, 1, 7], [2, 4, 0]], dtype=torch.int32)
    lengths = torch.tensor(LENGTHS)
    last = lengths - 1
    blocks = tables.long().gather(1, (last // BLOCK_SIZE)[:, None])[:, 0]
    return Step(
        tokens=torch.tensor([[7, 30, 11]]),
        positions=last[None],
        slots=blocks * BLOCK_SIZE + last % BLOCK_SIZE,
        decode_tokens=len(LENGTHS),
        tables=tables,
        lengths=lengths,
        longest=max(LENGTHS),
        rows=torch.arange(len(LENGTHS)),
        block_size=BLOCK_SIZE,
    )
