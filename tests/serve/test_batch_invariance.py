"""Batch-invariant engines: tokens and their chances are equal to the bit alone and in any company."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compress.conftest import SPEC, random_model
from tests.covering import sampled, thorough
from tests.models.huggingface.reference import pair
from tests.serve.company import BASE, assert_company_changes_nothing
from tests.serve.conftest import SHAPE
from tests.serve.test_families import LENGTHS, expected, greedy
from tests.serve.test_packed_weight import coded_as, in_8_bit_floats, quantized
from tightfit.errors import UserError
from tightfit.memory.formulas.serving import CacheFormat
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.adapter import Adapter
from tightfit.models.initialisation import init_weights
from tightfit.models.quantized.described import INT8_SCHEME
from tightfit.models.quantized.linear import OUTLIER
from tightfit.serve.budget import decide_budget
from tightfit.serve.cache.paged import PagedCache
from tightfit.serve.config import EngineConfig, Speculation
from tightfit.serve.engine import Engine
from tightfit.serve.forward.row_tiles import PROBES, SIZES, _trial, cut_rows, steady_sizes
from tightfit.serve.requests.request import Answer, Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.schedule.step import Step
from tightfit.serve.service import Service
from tightfit.serve.weights import half as half_weight
from tightfit.serve.weights.half import cpu_has_products


@sampled(2)
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 40), marks=pytest.mark.thorough)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_company_changes_no_bit(dtype: torch.dtype, seeds: range) -> None:
    """Random arrivals, cancels, chunk sizes, prefixes and preemptions, by recomputation and to the host."""
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    init_weights(model, gain=2.0)
    model = model.to(dtype)
    trials = [assert_company_changes_nothing(model, BASE, seed=seed, count=10, longest=32) for seed in seeds]
    assert sum(seen.compared for seen in trials) > 6 * len(seeds)
    for what in ("preemptions", "restored", "cached"):
        assert sum(getattr(seen, what) for seen in trials) > 0, what
    assert any(seen.preemptions and not seen.restored for seen in trials), "all of them were kept on the host"


@sampled(3)
@pytest.mark.parametrize(
    "name", [thorough("qwen3"), "gemma2", "gpt2", thorough("qwen3_moe"), "gpt_oss", "deepseek_v3", "phi3-longrope-long"]
)
def test_families(name: str) -> None:
    """Norms of heads, soft caps and windows, layer norms, experts, sinks, latent attention, ropes by length."""
    model = pair(name).ours
    seen = assert_company_changes_nothing(model, BASE, seed=3, count=7, longest=16)
    assert seen.compared >= 5


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_keys_and_values_in_a_byte(model: Decoder, form: CacheFormat) -> None:
    assert_company_changes_nothing(model, replace(BASE, cache_format=form), seed=5, count=7, longest=32)


@sampled(3)
@pytest.mark.parametrize("kind", ["packed", "not joined", "fp8", "fp8 inputs", "llm.int8"])
def test_compressed_models(kind: str) -> None:
    """LLM.int8 keeps channels wide that are large in any row, so its rows see one another: one at a time."""
    made = {
        "packed": lambda: quantized(),
        "not joined": lambda: quantized(alike=False),
        "fp8": lambda: in_8_bit_floats(rounded=False),
        "fp8 inputs": lambda: in_8_bit_floats(rounded=True),
        "llm.int8": lambda: in_8_bits_with_outliers(),
    }
    model = made[kind]()
    assert_company_changes_nothing(model, BASE, seed=3, count=7, longest=20)
    tiles = Engine(model, None, BASE).runner.tiles
    assert tiles is not None
    assert (tiles.sizes == (1,)) == (kind == "llm.int8")


def in_8_bits_with_outliers() -> Decoder:
    """With embeddings so large that some inputs of every layer are outliers."""
    model = random_model(SPEC)
    for layer in model.layers:
        mlp: Any = layer.mlp
        mlp.gate, mlp.up = (coded_as(part, INT8_SCHEME) for part in (mlp.gate, mlp.up))
        torch.nn.init.constant_(layer.mlp_norm.weight, OUTLIER / 2)  # type: ignore[arg-type]
    return model


@pytest.mark.skipif(not cpu_has_products(), reason="this CPU's torch has no such products")
def test_weights_in_16_bits(monkeypatch: pytest.MonkeyPatch, model: Decoder) -> None:
    monkeypatch.setattr(half_weight, "FEWEST_COPIED", 1)
    published = Decoder(SHAPE)
    published.load_state_dict({name: part.bfloat16().float() for name, part in model.state_dict().items()})
    assert Engine(published, None, BASE).budget.half_bytes > 0
    assert_company_changes_nothing(published, BASE, seed=6, count=7, longest=32)


def test_steps_launched_ahead_choose_the_same(model: Decoder) -> None:
    """Those without chances are chosen where the model is, the others on the host; there the two meet."""
    ahead = replace(BASE, async_steps=True)
    assert_company_changes_nothing(model, ahead, seed=1, count=10, longest=32)
    requests = [
        Request(id=str(i), prompt=[i + 1, 5, 9] * (i + 1), sampling=Sampling(max_tokens=9, temperature=i % 2, seed=i))
        for i in range(6)
    ]
    together = Engine(model, None, ahead).generate(requests)
    for request in requests:
        alone = Engine(model, None, BASE).generate([request])
        assert alone[request.id][0].tokens == together[request.id][0].tokens


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_answers_are_still_those_of_transformers(name: str) -> None:
    found = Engine(pair(name).ours, None, replace(BASE, step_tokens=11)).generate(greedy(name))
    assert [found[str(i)][0].tokens for i in range(len(LENGTHS))] == expected(name)


def test_the_services_thread_computes_the_same(model: Decoder) -> None:
    request = Request(id="a", prompt=[3, 1, 4, 1, 5], sampling=Sampling(max_tokens=12, temperature=0, logprobs=2))
    alone = Engine(model, None, BASE).generate([request])["a"][0]

    async def ask() -> Answer:
        service = Service(Engine(model, None, BASE))
        service.start(asyncio.get_running_loop())
        try:
            return (await service.answers(request))[0]
        finally:
            service.stop()

    assert asyncio.run(ask()).logprobs == alone.logprobs


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, 3.0), thorough(5, None), thorough(None, 3.0)])
def test_the_kernel_of_a_gpu_gives_a_token_the_same_in_any_company(window: int | None, softcap: float | None) -> None:
    """In Triton's interpreter: rows of two sequences together, one by one, and as torch has it."""
    torch.manual_seed(0)
    cache = PagedCache(SHAPE, 40, 4, torch.device("cpu"), torch.float32, impl="triton")
    assert cache.has_row_kernel
    cache.whole.numbers.normal_()
    lengths = [1, 3, 40, 41, 9]
    tables = torch.randperm(40)[:36].view(2, 18)[[0, 0, 0, 0, 1]].int()
    query = torch.randn(len(lengths), SHAPE.heads, SHAPE.head_dim)
    settings: Any = {"scale": 0.3, "window": window, "softcap": softcap, "sinks": None}

    def attended(rows: slice) -> Tensor:
        step = step_of_rows(tables[rows], lengths[rows])
        return cache.attend_rows(step, 0, query[rows], **settings)

    together = attended(slice(None))
    for row in range(len(lengths)):
        assert torch.equal(attended(slice(row, row + 1))[0], together[row])
    cache.impl = "torch"
    assert not cache.has_row_kernel
    torch.testing.assert_close(attended(slice(None)), together, rtol=1e-5, atol=1e-5)


def step_of_rows(tables: Tensor, lengths: list[int]) -> Step:
    unused = torch.zeros(1, len(lengths), dtype=torch.int64)
    return Step(
        tokens=unused,
        positions=unused,
        slots=unused[0],
        decode_tokens=len(lengths),
        tables=tables,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        longest=0,
        pieces=[],
        rope_lengths=[],
        rows=unused[0],
        block_size=4,
        row_by_row=True,
    )


def test_sizes_whose_rows_disagree_are_left_out() -> None:
    """Rows that depend on their place, or on the size of their pass, as a library's kernels might make them."""

    def made(size: int, rows: list[float]) -> Tensor:
        return torch.tensor(rows[:size])[:, None].expand(size, 3).contiguous()

    alike = [1.0] * 64
    assert steady_sizes(lambda size, _: made(size, alike), (16, 1, 4, 64)) == (1, 4, 16, 64)
    assert steady_sizes(lambda size, _: made(size, [float(size > 2)] * 64), (16, 1, 4, 64)) == (4, 16, 64)
    assert steady_sizes(lambda size, _: made(size, [1.0] * 20 + [2.0] * 44), (16, 1, 4, 64)) == (1, 4, 16)
    at_the_end = [1.0, 1.0, 1.0, 1.0 + 2**-23] * 16
    assert steady_sizes(lambda size, _: made(size, at_the_end), (16, 1, 4, 64)) == (1,)
    assert steady_sizes(lambda size, _: made(size, at_the_end), (16,)) == (1,)
    later = steady_sizes(lambda size, probe: made(size, [1.0 + (probe == 2 and size == 64)] * 64), (16, 1, 4, 64))
    assert later == (1, 4, 16)


def test_what_is_rounded_takes_more_to_try(model: Decoder) -> None:
    """Of a difference that shows in one of ten thousand numbers; too few of them: one size."""
    cpu = torch.device("cpu")
    assert _trial(cpu, None) == (SIZES["cpu"], PROBES)
    assert _trial(cpu, 2**17) == (SIZES["cpu"], PROBES)
    assert _trial(cpu, 2**14) == (SIZES["cpu"], 8)
    assert _trial(cpu, 2**13 - 1) == (SIZES["cpu"][:1], PROBES)
    for changes in ({"cache_format": "int8"}, {"cache_format": "fp8"}):
        tiles = Engine(model, None, replace(BASE, **changes)).runner.tiles  # type: ignore[arg-type]
        assert tiles is not None
        assert len(tiles.sizes) == 1
    narrow = Engine(Decoder(SHAPE).bfloat16(), None, BASE).runner.tiles
    assert narrow is not None
    assert (len(narrow.sizes), len(narrow.head_sizes)) == (1, 1)


def test_every_row_is_in_one_pass() -> None:
    for sizes in ((1,), (16,), (4, 16), (1, 4, 16, 64)):
        for count in range(200):
            at = 0
            for first, rows, size in cut_rows(count, sizes):
                assert (first, size in sizes) == (at, True)
                assert 0 < rows <= size
                at += rows
            assert at == count
    assert list(cut_rows(84, (1, 4, 16, 64))) == [(0, 64, 64), (64, 16, 16), (80, 4, 4)]
    assert list(cut_rows(3, (1, 4, 16, 64))) == [(0, 3, 4)]


def test_a_padded_pass_is_counted(model: Decoder) -> None:
    """Logits of 64 rows at most, in float32, where the engine itself has a sequence or two."""
    plain = EngineConfig(max_sequences=2, step_tokens=512, cache_bytes=2**20)
    without, counted = (decide_budget(model, replace(plain, batch_invariant=on)).step_bytes for on in (False, True))
    assert counted - without == 64 * model.spec.vocab_size * 4
    small = replace(plain, step_tokens=8, batch_invariant=True)
    assert decide_budget(model, small).step_bytes == decide_budget(model, replace(small, step_tokens=64)).step_bytes


@pytest.mark.parametrize("speculation", ["lookup", "draft", "skip"])
def test_guesses_are_refused(speculation: Speculation) -> None:
    with pytest.raises(UserError, match="batch_invariant"):
        EngineConfig(batch_invariant=True, speculation=speculation)


def test_adapters_are_refused(model: Decoder) -> None:
    with pytest.raises(UserError, match="not there for adapters yet"):
        Engine(model, None, BASE, adapters={"poet": Adapter("poet", 1, {})})
