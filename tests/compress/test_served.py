"""Compressed models served: greedy answers are those of transformers with the weights that the codes stand for."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.compress.conftest import random_model
from tests.compress.test_compression import run
from tests.compress.test_structured import cut, spec_of, with_biases
from tests.covering import sampled
from tightfit.compress.recipe import Recipe, Step, recipe_of
from tightfit.compress.structure.structured import KeptShape
from tightfit.models.decoder import Decoder
from tightfit.models.loading import load_model
from tightfit.models.saving import export_model, write_model
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling

PROMPTS = [[(7 * i + 3 * length) % 250 for i in range(length)] for length in (3, 17, 9)]
NEW_TOKENS = 8
NEAR = 1e-3
"""Logits nearer than this may change places with the order of sums."""
MIXED = Recipe((Step(method="gptq", bits=4, group=8), Step(method="rtn", bits=8, layers=("*.k", "*.down"))))
CASES: dict[str, tuple[str, Recipe | KeptShape]] = {
    "gemma2": ("gemma2", recipe_of("gptq", bits=4, group=8)),
    "gemma3": ("gemma3", recipe_of("mxfp4", layers=("*.attention.[qkv]",))),
    "experts": ("qwen3_moe", recipe_of("rtn", bits=4, group=4)),
    "latent attention": ("deepseek_v3", recipe_of("gptq", bits=4, group=2)),
    "several widths": ("qwen2", MIXED),
    "signs": ("llama", recipe_of("binary", group=8)),
    "cut gpt-oss": ("gpt_oss", KeptShape(experts=4, heads=2)),
    "cut DeepSeek": ("deepseek_v3", KeptShape(layers=2, mlp=24)),
}
GUESSED = ("experts", "several widths", "cut DeepSeek")
"""Those that are also served with a draft, which is the model they were made of: more shows nothing of guesses."""


@pytest.fixture(scope="module", params=CASES)
def served(
    request: pytest.FixtureRequest,
    tokenizer: Tokenizer,
    text: Path,
    token_cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path, Any]:
    """A model, what was made of it, and that in plain numbers as transformers loads it."""
    name, way = CASES[request.param]
    top = tmp_path_factory.mktemp("served")
    (top / "model").mkdir()
    write_model(top / "model", with_biases(random_model(spec_of(name))), tokenizer)
    make: Any = cut if isinstance(way, KeptShape) else run
    make(top / "model", top / "small", way, text, token_cache)
    export_model(str(top / "small"), top / "plain", form="hf", dtype="fp32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        top / "plain", dtype=torch.float32, attn_implementation="eager"
    )
    return top / "model", top / "small", theirs


@sampled(4)
def test_answers_are_what_transformers_generates(served: tuple[Path, Path, Any]) -> None:
    _, small, theirs = served
    assert_answers(theirs, small, None)


@sampled(3)
@pytest.mark.parametrize("served", GUESSED, indirect=True)
def test_a_draft_changes_no_answer(served: tuple[Path, Path, Any]) -> None:
    original, small, theirs = served
    assert_answers(theirs, small, load_model(str(original)).model, speculation="draft")


def assert_answers(theirs: Any, small: Path, draft: Decoder | None, **more: Any) -> None:
    config = EngineConfig(max_sequences=3, step_tokens=40, block_size=4, cache_bytes=2**20, **more)
    sampling = Sampling(max_tokens=NEW_TOKENS, temperature=0)
    asked = [Request(id=str(i), prompt=prompt, sampling=sampling) for i, prompt in enumerate(PROMPTS)]
    found = Engine(load_model(str(small)).model, None, config, draft=draft).generate(asked)
    for i, prompt in enumerate(PROMPTS):
        assert_greedy(theirs, prompt, found[str(i)][0].tokens)


def assert_greedy(model: Any, prompt: list[int], answer: list[int]) -> None:
    """Every token of the answer is the likeliest after those before it, or as likely."""
    assert len(answer) == NEW_TOKENS
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    behind = logits.amax(-1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert float(behind.max()) < NEAR * float(logits.std()), behind
