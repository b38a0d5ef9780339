"""Serving on a real card: graphs, overlapped kernels and tokens chosen there give what transformers gives elsewhere."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.nvidia.compiler import get_ptxas_version

from benchmarks import serve_memory
from tests.conftest import SENTENCES
from tests.kernels.truth import assert_no_worse
from tests.models.huggingface.reference import pair
from tests.serve import ways
from tests.serve.compiling import compilations
from tests.serve.test_families import expected, greedy
from tightfit.kernels.decoding.decode_linear import decode_linear, decode_linear_eager
from tightfit.kernels.decoding.paged_attention import paged_attention, paged_attention_eager
from tightfit.memory.formulas.serving import CacheFormat
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.resolve import resolve_spec
from tightfit.models.text.tokenizer import train_tokenizer
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.graphs.compiler import Compiler
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.schedule.step import Step

CONFIG = EngineConfig(max_sequences=4, step_tokens=11, block_size=16, cache_bytes=2**22)
FAMILIES = [
    "llama",
    "llama-biases",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3-longrope-long",
    "gpt2",
    "gpt_oss",
    "deepseek_v3",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_answers_are_those_of_transformers(name: str) -> None:
    wanted = expected(name)
    model = Decoder(pair(name).ours.spec).cuda()
    model.load_state_dict(pair(name).ours.state_dict())
    for config in (CONFIG, replace(CONFIG, step_tokens=64), replace(CONFIG, graphs=False, overlap=False)):
        engine = Engine(model, None, config)
        found = engine.generate(greedy(name))
        assert [found[str(i)][0].tokens for i in range(4)] == wanted, config
        assert engine.pool.free == engine.pool.size


@pytest.fixture(scope="module")
def small() -> Decoder:
    """Of SmolLM2's shape with few layers: real widths, nine heads in groups of three."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Decoder(replace(resolve_spec("smollm2-135m"), layers=4))
    init_weights(model, gain=1.5)
    return model


def prompts(count: int, prompt_step: int) -> list[list[int]]:
    return [[(7 * i + j) % 1000 for j in range(5 + prompt_step * i)] for i in range(count)]


def answers(engine: Engine, count: int = 6, prompt_step: int = 40, **settings: Any) -> list[list[int]]:
    sampling = Sampling(max_tokens=24, **({"temperature": 0} | settings))
    requests = [
        Request(id=str(i), prompt=each, sampling=sampling) for i, each in enumerate(prompts(count, prompt_step))
    ]
    made = engine.generate(requests)
    assert engine.pool.free == engine.pool.size
    return [made[request.id][0].tokens for request in requests]


def test_every_way_of_running_gives_the_same_tokens(small: Decoder) -> None:
    config = EngineConfig(max_sequences=8, step_tokens=128, cache_bytes=2**28)
    wanted = answers(Engine(small, None, replace(config, async_steps=False)))
    ways: list[Any] = [{}, {"graphs": False}, {"overlap": False}, {"max_sequences": 1}, {"step_tokens": 1024}]
    for changes in ways:
        assert answers(Engine(small, None, replace(config, **changes))) == wanted, changes
    seeded: Any = {"temperature": 1.1, "seed": 3, "top_p": 0.9}
    sampled = answers(Engine(small, None, replace(config, async_steps=False)), **seeded)
    assert answers(Engine(small, None, config), **seeded) == sampled
    assert sampled != wanted


@pytest.fixture(scope="module")
def repeating(small: Decoder) -> Decoder:
    """The same widths with few words, so that random answers repeat some: guesses are made and penalties weigh."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Decoder(replace(small.spec, vocab_size=300))
    init_weights(model, gain=1.5)
    return model


def test_guesses_change_nothing(repeating: Decoder) -> None:
    """By lookup, skipped layers, a draft of half the layers, and one that is the model itself."""
    torch.manual_seed(1)
    with torch.device("cuda"):
        smaller = Decoder(replace(repeating.spec, layers=2))
    init_weights(smaller, gain=1.5)
    ways.check_guesses(repeating, smaller)


def test_giving_way_changes_nothing(small: Decoder) -> None:
    ways.check_giving_way(small)


def test_adapters_answer_as_if_merged(repeating: Decoder) -> None:
    ways.check_adapters(repeating)


def test_penalties_are_those_that_are_written_out(repeating: Decoder) -> None:
    ways.check_penalties(repeating)


def test_forms_hold_beside_plain_requests(repeating: Decoder) -> None:
    pytest.importorskip("llguidance")
    ways.check_forms(repeating, train_tokenizer(SENTENCES, 300))


def forget_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process had launched none of ours, and torch's compiler had not named an assembler of its own: Triton
    keeps the version of the first it knew in its keys, where other processes would have the second's."""
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    get_ptxas_version.cache_clear()
    modules = [module for name, module in sys.modules.items() if name.startswith("tightfit.kernels.")]
    for kernel in (value for module in modules for value in vars(module).values()):
        if hasattr(kernel, "device_caches"):
            kernel.device_caches.clear()


def test_other_processes_compile_all_that_answers_need(
    small: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    narrow = Decoder(small.spec).cuda().bfloat16()
    narrow.load_state_dict(small.state_dict())
    config = EngineConfig(max_sequences=40, step_tokens=256, max_length=1024, cache_bytes=2**28)
    forget_kernels(monkeypatch)
    with compilations() as found:
        with Compiler() as compiler:
            engine = Engine(narrow, None, config, compiler=compiler)
        assert len(found) > 10
        assert all(found), "compiled here"
        found.clear()
        made = [answers(engine, count, prompt_step=20) for count in (1, 2, 40)]
    assert found == [], "compiled while somebody waited"
    for prompt, answer in zip(prompts(40, 20), made[-1], strict=True):
        assert_near_best(small, prompt, answer)


def assert_near_best(model: Decoder, prompt: list[int], answer: list[int]) -> None:
    """Every token of `answer` scores about as high as any, by `model` in float32: what greedy choice in bf16 may do."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer], device="cuda")).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer, device="cuda")[:, None])[:, 0]
    assert ((logits.amax(1) - chosen) / logits.std(1)).max() < 0.3, "a token drawn blindly is about four below"


def test_bfloat16_logits_are_as_good_as_the_decoders(small: Decoder) -> None:
    """One decoding step of the fused kernels against the plain decoder, both against float32."""
    narrow = Decoder(small.spec).cuda().bfloat16()
    narrow.load_state_dict(small.state_dict())
    wide = Decoder(small.spec).cuda()
    wide.load_state_dict(narrow.state_dict())
    tokens = torch.randint(0, 1000, (1, 40), device="cuda")
    with torch.no_grad():
        truth = wide(tokens).logits[0, -1]
        eager = narrow(tokens).logits[0, -1]
    engine = Engine(narrow, None, EngineConfig(max_sequences=2, step_tokens=64, cache_bytes=2**28, async_steps=False))
    caught: list[torch.Tensor] = []
    run = engine.runner.logits

    def catching(step: Step) -> torch.Tensor:
        made = run(step)
        caught.append(made[0].float().clone())
        return made

    engine.runner.logits = catching  # type: ignore[method-assign]
    last = int(tokens[0, -1])
    forced = Sampling(max_tokens=2, temperature=0, logit_bias={last: 100.0})
    engine.generate([Request(id="a", prompt=tokens[0, :-1].tolist(), sampling=forced)])
    assert len(caught) == 2
    errors = [((each.float() - truth).norm() / truth.norm()).item() for each in (caught[1], eager)]
    assert errors[0] <= 1.2 * errors[1] + 1e-3


@pytest.mark.parametrize(("N", "K"), [(3072, 2048), (2048, 8192), (5120, 576)])
@pytest.mark.parametrize("overlap", [False, True])
def test_products_at_real_sizes(N: int, K: int, overlap: bool) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(n, K, device="cuda").bfloat16() for n in (1, N))
    weight *= K**-0.5
    norm, residual = torch.rand(K, device="cuda").bfloat16(), torch.randn(1, N, device="cuda").bfloat16()
    cases: list[Any] = [{"norm": norm, "norm_eps": 1e-5}, {"residual": residual}, {"activation": "silu"}]
    for settings in cases:
        found = decode_linear(x, weight, overlap=overlap, **settings)
        eager = decode_linear_eager(x, weight, **settings)
        exact: Any = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in settings.items()}
        truth = decode_linear_eager(x.double(), weight.double(), **exact)
        assert_no_worse([found], [eager], [truth])


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (None, 20.0)])
def test_attention_at_real_sizes(D: int, window: int | None, softcap: float | None) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([1, 63, 700, 1999], dtype=torch.int32, device="cuda")
    tables = torch.randperm(4 * 125, device="cuda").view(4, 125).int()
    query = torch.randn(4, 32, D, device="cuda").bfloat16()
    keys, values = torch.randn(2, 500, 16, 8, D, device="cuda").bfloat16()
    settings: Any = {"scale": D**-0.5, "window": window, "softcap": softcap}
    for splits in (None, 1, 32):
        found = paged_attention(query, keys, values, tables, lengths, splits=splits, **settings)
        eager = paged_attention_eager(query, keys, values, tables, lengths, **settings)
        truth = paged_attention_eager(query.double(), keys.double(), values.double(), tables, lengths, **settings)
        assert_no_worse([found], [eager], [truth])


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_keys_and_values_in_a_byte_each(small: Decoder, form: CacheFormat) -> None:
    """Kernels over codes and captured steps give what gathered, widened blocks give without graphs."""
    config = EngineConfig(max_sequences=6, step_tokens=128, cache_bytes=2**24, cache_format=form)
    fast, plain = Engine(small, None, config), Engine(small, None, replace(config, graphs=False, async_steps=False))
    plain.runner.cache.impl = "torch"
    assert answers(fast) == answers(plain)
    assert fast.runner.cache.stored_dtype.itemsize == 1


@pytest.mark.alone
def test_a_gpus_memory_is_taken_as_the_budget_said() -> None:
    """All of it within two parts in a hundred; weights and cache are exact but for what an allocator rounds up."""
    row: Any = serve_memory.measure("1b", argparse.Namespace(device="cuda"))
    for line, error in (("weights", 0.005), ("cache", 0.002), ("total", 0.02)):
        assert row[f"{line}_mib"] == pytest.approx(row[f"predicted_{line}_mib"], rel=error), row
