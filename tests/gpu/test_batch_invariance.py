"""Batch-invariant engines on a real card: graphs, libraries' products and our kernels, equal bits in any company."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.models.huggingface.reference import pair
from tests.serve.company import BASE, assert_company_changes_nothing
from tightfit.errors import UserError
from tightfit.kernels.decoding.top_k_top_p import cumulated
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.resolve import resolve_spec
from tightfit.serve.engine import Engine
from tightfit.serve.sampling.sampler import draw

CARD = replace(BASE, block_size=16, cache_bytes=2**26)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def small(request: pytest.FixtureRequest) -> Decoder:
    """Of SmolLM2's shape with few layers: real widths, nine heads in groups of three."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Decoder(replace(resolve_spec("smollm2-135m"), layers=6))
    init_weights(model, gain=1.5)
    return model.to(request.param)


@pytest.mark.parametrize(
    "changes",
    [{}, {"graphs": False}, {"async_steps": False}, {"cache_format": "int8"}],
    ids=["all", "plain", "host", "int8"],
)
def test_company_changes_no_bit(small: Decoder, changes: Any) -> None:
    config = replace(CARD, **changes)
    trials = [assert_company_changes_nothing(small, config, seed=seed, count=14, longest=200) for seed in range(3)]
    assert sum(seen.compared for seen in trials) > 24
    assert sum(seen.preemptions for seen in trials) > 0
    assert sum(seen.cached for seen in trials) > 0
    tiles = Engine(small, None, config).runner.tiles
    assert tiles is not None
    print(f"{small.embed.weight.dtype}: passes of {tiles.sizes} rows, {tiles.head_sizes} of the output projection")
    assert 1 not in tiles.sizes, "no size but one row at a time was steady: right, and slow"


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "qwen3", "qwen3_moe", "gpt_oss", "phi3-longrope-long"])
def test_families(name: str) -> None:
    model = Decoder(pair(name).ours.spec).cuda()
    model.load_state_dict(pair(name).ours.state_dict())
    assert assert_company_changes_nothing(model, CARD, seed=3, count=7, longest=16).compared >= 5


def test_latent_attention_has_no_such_kernel() -> None:
    model = Decoder(pair("deepseek_v3").ours.spec).cuda()
    with pytest.raises(UserError, match="no kernel here for this model's attention; use cpu"):
        Engine(model, None, CARD)


def test_a_row_is_cumulated_alike_beside_other_work() -> None:
    """Torch's own scan of one long row adds up in whatever order its blocks end."""
    chances = torch.rand(1, 128_256, device="cuda").softmax(-1)
    wanted = cumulated(chances)
    exact = chances.double().cumsum(-1)
    assert (wanted - exact).abs().max() < 1e-6
    beside, busy = torch.cuda.Stream(), torch.rand(4096, 4096, device="cuda")
    for _ in range(200):
        with torch.cuda.stream(beside):
            busy @ busy
        assert torch.equal(cumulated(chances), wanted)
    torch.cuda.synchronize()


def test_draws_are_those_of_a_cpu() -> None:
    """Sums of counts are exact; tokens without a chance are never drawn, whatever blocks they are in."""
    torch.manual_seed(0)
    chances = (3 * torch.randn(48, 128_256)).masked_fill(torch.rand(128_256) < 0.5, -torch.inf).softmax(-1)
    numbers = torch.rand(48, dtype=torch.float64)
    ends = chances.double().cumsum(-1)[:, 1023::1024]  # draws at the borders of blocks
    for at in (numbers, *ends[:, ::9].T):
        tokens = draw(chances.cuda(), at.cuda()).cpu()
        assert torch.equal(tokens, draw(chances, at))
        assert (chances.gather(1, tokens[:, None]) > 0).all()
