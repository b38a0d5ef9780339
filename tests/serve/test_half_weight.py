"""Weights read in 16 bits on a CPU: only where nothing is lost, and the same answers then."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.serve.conftest import SHAPE
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.weights import half as half_weight
from tightfit.serve.weights.half import HalfWeight, cpu_has_products, halved, is_exact, is_near
from tightfit.serve.weights.joint import half_bytes
from tightfit.serve.weights.weight import PlainWeight

has_products = pytest.mark.skipif(not cpu_has_products(), reason="this CPU's torch has no products with 16-bit weights")
PROMPTS = ([5, 17, 250, 3, 9], [8, 8, 41], list(range(20, 60)))


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """A model of bfloat16 numbers, as checkpoints are published; its small matrices count as large."""
    monkeypatch.setattr(half_weight, "FEWEST_COPIED", 1)
    torch.manual_seed(2)
    made = Decoder(replace(SHAPE, qkv_bias=True))
    init_weights(made, gain=2.0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter.bfloat16())
    return made.eval()


def _answers(engine: Engine) -> list[list[int]]:
    requests = [
        Request(id=str(index), prompt=prompt, sampling=Sampling(max_tokens=12, temperature=0))
        for index, prompt in enumerate(PROMPTS)
    ]
    made = engine.generate(requests)
    return [made[request.id][0].tokens for request in requests]


def test_published_numbers_fit_and_trained_ones_do_not() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 64) * 0.02
    assert not is_exact(weight)
    assert is_exact(weight.half().float())
    assert is_exact(weight.bfloat16().float())
    assert not is_exact(weight.bfloat16().float() * 2.0**-16)  # most are too small for 16 bits
    assert not is_exact(weight.bfloat16().float() * 2.0**24)  # and here too large


@has_products
@pytest.mark.parametrize("piece_rows", [8192, 40])
def test_a_product_is_float32s(piece_rows: int, published: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off from float64 by no more than a sum of so many float32 terms may be, in one piece or several."""
    monkeypatch.setattr(half_weight, "PIECE_ROWS", piece_rows)
    weight, x = published.head.weight, torch.randn(5, SHAPE.hidden_size)
    half = halved(PlainWeight(weight, None))
    assert isinstance(half, HalfWeight)
    true = F.linear(x.double(), weight.double())
    bound = SHAPE.hidden_size * 2.0**-24 * F.linear(x.abs().double(), weight.abs().double())
    assert ((half.product(x) - true).abs() <= bound).all()


@has_products
def test_answers_are_those_of_float32(published: Decoder) -> None:
    half, plain = (Engine(published, None, EngineConfig(half_weights=each)) for each in (True, False))
    assert half.runner.program is not None
    assert isinstance(half.runner.program.head, HalfWeight)
    assert isinstance(plain.runner.program.head, PlainWeight)
    assert _answers(half) == _answers(plain)


@has_products
def test_the_budget_counts_the_copy(published: Decoder) -> None:
    half, plain = (Engine(published, None, EngineConfig(half_weights=each)) for each in (True, False))
    matrices = [module.weight for module in published.modules() if isinstance(module, torch.nn.Linear)]
    assert half.budget.weight_bytes - plain.budget.weight_bytes == half_bytes(published)
    assert half_bytes(published) == 2 * sum(weight.numel() for weight in matrices)
    others = sum(each.nbytes for each in published.parameters()) - 4 * sum(weight.numel() for weight in matrices)
    assert half.budget.read_bytes == half.budget.half_bytes + others - published.embed.weight.nbytes


def test_weights_that_16_bits_do_not_hold_are_read_as_they_are(model: Decoder) -> None:
    engine = Engine(model, None)
    assert engine.budget.half_bytes == 0
    assert isinstance(engine.runner.program.head, PlainWeight)


@has_products
def test_weights_that_a_file_rounded_may_be_rounded_once_more(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """By 16-bit floats' spacing at most; not where answers are to be exact."""
    monkeypatch.setattr(half_weight, "FEWEST_COPIED", 1)
    rounded = EngineConfig(rounded_weights=True)
    x = torch.randn(5, SHAPE.hidden_size)
    head = Engine(model, None, rounded).runner.program.head
    assert isinstance(head, HalfWeight)
    true = F.linear(x, model.head.weight)
    assert torch.linalg.vector_norm(head.product(x) - true) <= 2.0**-11 * torch.linalg.vector_norm(true)
    for exact in (replace(rounded, packed_products=False), replace(rounded, batch_invariant=True)):
        assert isinstance(Engine(model, None, exact).runner.program.head, PlainWeight)
    assert not is_near(model.head.weight * 2.0**24)  # too large
