"""A coded output projection in the engine: answers, whatever way they are made, are those of the matrix that its codes
stand for, and the budget counts it as it is held."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.compress.conftest import SPEC, random_model
from tests.serve.test_packed_weight import coded_as
from tests.serve.test_streams import CONFIG
from tightfit.models.decoder import Decoder
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.quantized.scheme import UNREAD_BYTES, Scheme
from tightfit.models.spec import ModelSpec
from tightfit.serve.beam import likeliest_answers
from tightfit.serve.budget import decide_budget
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.forward.row_tiles import SIZES
from tightfit.serve.prompt_logprobs import prompt_logprobs
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.weights.int4 import Int4Weight
from tightfit.serve.weights.packed import PackedWeight

DEEP = replace(SPEC, layers=4, tied=False)
WIDE = replace(DEEP, vocab_size=320, hidden_size=128, heads=2, kv_heads=1, head_dim=64)
EIGHT, FOUR = Scheme(bits=8, group=0), Scheme(bits=4, group=64, symmetric=False)
EXACT = replace(CONFIG, packed_products=False)
PROMPTS = [[3 + (7 * i + j) % 250 for j in range(4 + 5 * i)] for i in range(3)]
NEW_TOKENS = 10
NEAR = 1e-3
"""Logits nearer than this share of their spread may change places with the order of sums."""
WAYS: dict[str, EngineConfig] = {
    "joined": EXACT,
    "lookup": replace(EXACT, speculation="lookup", speculated_tokens=2),
    "skipped layers": replace(EXACT, speculation="skip", skipped_layers=1, speculated_tokens=2),
    "batch invariant": replace(EXACT, batch_invariant=True),
    "steps at fixed addresses": replace(EXACT, async_steps=True),
}


def pair(scheme: Scheme, *, spec: ModelSpec = DEEP, layers: bool = False) -> tuple[Decoder, Decoder]:
    """A model whose output projection (and, if so, `layers`) is in codes, and the same with a plain projection."""
    model = random_model(spec)
    for layer in model.layers if layers else ():
        for part in (layer.attention, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(part, name, coded_as(linear, Scheme(bits=4, group=32, symmetric=False)))
    head: Any = coded_as(model.head, scheme)
    plain = deepcopy(model)
    plain.head.weight = nn.Parameter(head.dequantize(torch.float32), requires_grad=False)
    model.head = head
    return model, plain


def assert_greedy(plain: Decoder, prompt: list[int], answer: list[int]) -> None:
    """Every token is the likeliest after those before it, or as likely, by the decoder with the plain projection."""
    assert len(answer) == NEW_TOKENS
    with torch.no_grad():
        logits = plain(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    behind = logits.amax(-1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert float(behind.max()) < NEAR * float(logits.std()), behind


@pytest.mark.parametrize("scheme", [EIGHT, FOUR], ids=lambda scheme: scheme.describe())
@pytest.mark.parametrize("way", WAYS)
def test_greedy_answers(way: str, scheme: Scheme) -> None:
    model, plain = pair(scheme)
    engine = Engine(model, None, WAYS[way])
    assert isinstance(model.head, QuantizedLinear)
    assert engine.runner.program is not None
    assert isinstance(engine.runner.program.head, PackedWeight)
    sampling = Sampling(max_tokens=NEW_TOKENS, temperature=0)
    asked = [Request(id=str(i), prompt=prompt, sampling=sampling) for i, prompt in enumerate(PROMPTS)]
    found = engine.generate(asked)
    for i, prompt in enumerate(PROMPTS):
        assert_greedy(plain, prompt, found[str(i)][0].tokens)


def test_log_probabilities_and_beams() -> None:
    model, plain = pair(FOUR)
    engine = Engine(model, None, EXACT)
    prompt = PROMPTS[2]
    with torch.no_grad():
        wanted = plain(torch.tensor([prompt])).logits[0].log_softmax(-1)
    told = [each.logprob for each in prompt_logprobs(prompt, 2, engine)]
    assert told == pytest.approx([float(wanted[i, token]) for i, token in enumerate(prompt[1:])], rel=1e-4)
    request = Request(id="a", prompt=prompt, sampling=Sampling(max_tokens=4, temperature=0))
    (_, [found]), (_, [answer]) = (
        next(likeliest_answers(each, [request], 3)) for each in (engine, Engine(plain, None, EXACT))
    )
    assert found.tokens == answer.tokens


def test_a_cpu_multiplies_by_four_bits_and_expands_others() -> None:
    """4-bit codes are read as they are; 8-bit ones become a plain matrix where there are many, dequantized once."""
    wide = replace(CONFIG, max_length=64)
    for scheme, kind in ((Scheme(bits=4, group=32, symmetric=False), Int4Weight), (EIGHT, PackedWeight)):
        model, plain = pair(scheme, spec=WIDE, layers=True)
        engine = Engine(model, None, wide)
        assert engine.runner.program is not None
        if model.layers[0].attention.q.cpu_scales is None:
            pytest.skip("this CPU's torch has no fast product with 4-bit codes")
        assert isinstance(engine.runner.program.head, kind)
        with torch.no_grad():
            wanted = plain(torch.tensor([PROMPTS[0]])).logits[0, -1].log_softmax(-1)
        asked = Request(id="a", prompt=PROMPTS[0], sampling=Sampling(max_tokens=1, temperature=0, logprobs=3))
        for token, logprob in engine.generate([asked])["a"][0].logprobs[0].top:
            assert logprob == pytest.approx(float(wanted[token]), abs=0.02 * float(wanted.std()))


def test_the_budget_counts_codes_and_what_expanding_them_takes() -> None:
    """Where rows are more than a kernel reads codes for; a CPU without products by these codes always expands them."""
    model, plain = pair(EIGHT)
    coded, wide = (Engine(each, None, EXACT).budget for each in (model, plain))
    assert isinstance(model.head, QuantizedLinear)
    numbers = DEEP.vocabulary_params
    assert wide.weight_bytes - coded.weight_bytes == 4 * numbers - EIGHT.held_bytes(DEEP.vocab_size, DEEP.hidden_size)
    assert coded.step_bytes - wide.step_bytes == UNREAD_BYTES * numbers
    assert coded.read_bytes == coded.weight_bytes - 4 * numbers  # all but the embedding


@pytest.mark.parametrize("is_invariant", [False, True], ids=["steps", "passes"])
def test_the_budget_counts_expanding_for_as_many_rows_as_are_multiplied(
    is_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch-invariant pass is padded to one of a few sizes, which may be more rows than there are sequences."""
    model, plain = pair(FOUR)
    config = replace(EXACT, batch_invariant=is_invariant)
    monkeypatch.setattr(QuantizedLinear, "expanding_bytes", lambda self, rows, dtype: 1000 * rows)
    coded, wide = (decide_budget(each, config).step_bytes for each in (model, plain))
    assert coded - wide == 1000 * (max(SIZES["cpu"]) if is_invariant else config.max_sequences)
