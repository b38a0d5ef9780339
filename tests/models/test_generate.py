"""Generation: greedy is argmax, sampling has the promised distribution, seeds repeat, limits hold."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.huggingface.reference import fill
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.generate import Sampling, continue_text, generate, probabilities
from tightfit.models.initialisation import init_weights
from tightfit.models.loading import LoadedModel
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import train_tokenizer

SPEC = ModelSpec(
    family="llama",
    vocab_size=61,
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_size=48,
    max_positions=64,
)
PROMPT = [5, 17, 3, 42, 8]
GREEDY = Sampling(max_tokens=20, temperature=0)
NEVER: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(0)
    made = Decoder(SPEC)
    init_weights(made, gain=3.0)
    return made


def tokens(model: Decoder, sampling: Sampling, stop: frozenset[int] = NEVER, count: int = 1) -> list[list[int]]:
    """The continuations, without what follows their ends."""
    steps = list(generate(model, PROMPT, sampling, stop_ids=stop, count=count))
    return [[token for token in column if token is not None] for column in zip(*steps, strict=True)]


def test_greedy_is_the_argmax_of_full_forwards(model: Decoder) -> None:
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(20):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert tokens(model, GREEDY) == [ids[len(PROMPT) :]]


def test_greedy_is_what_transformers_generates() -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        rms_norm_eps=SPEC.norm_eps,
    )
    theirs = LlamaForCausalLM(config).eval()
    ours = Decoder(SPEC)
    fill(ours, theirs.state_dict())
    expected = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert tokens(ours, GREEDY) == [expected[0, len(PROMPT) :].tolist()]


def test_all_continuations_of_a_greedy_prompt_are_the_same(model: Decoder) -> None:
    assert tokens(model, GREEDY, count=3) == tokens(model, GREEDY) * 3


def test_a_seed_repeats_and_the_global_generator_is_left_alone(model: Decoder) -> None:
    before = torch.get_rng_state()
    sampling = Sampling(max_tokens=20, temperature=1.5, seed=7)
    first = tokens(model, sampling, count=3)
    torch.rand(5)
    torch.set_rng_state(before)
    assert tokens(model, sampling, count=3) == first
    assert torch.equal(torch.get_rng_state(), before)
    assert len({tuple(row) for row in first}) == 3
    assert tokens(model, Sampling(max_tokens=20, temperature=1.5, seed=8), count=3) != first


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 1.0}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"temperature": 1.0, "top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 1.0, "top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 1.0, "top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"temperature": 1.0, "top_p": 0.01}, [1.0, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),
    ],
)
def test_probabilities_are_exact(settings: dict, expected: list[float]) -> None:
    order = torch.tensor([2, 0, 3, 1])
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[order] + 5
    made = probabilities(logits[None], Sampling(**settings))
    torch.testing.assert_close(made[0], torch.tensor(expected)[order])


def test_ties_do_not_widen_the_top_k() -> None:
    assert (probabilities(torch.zeros(1, 8), Sampling(top_k=3)) > 0).sum() == 3


def test_tokens_are_drawn_with_these_probabilities(model: Decoder) -> None:
    sampling = Sampling(max_tokens=1, temperature=2.0, top_k=12, top_p=0.9, seed=3)
    with torch.no_grad():
        expected = probabilities(model(torch.tensor([PROMPT])).logits[0, -1], sampling)
    draws = 20_000
    seen = torch.bincount(torch.tensor(tokens(model, sampling, count=draws)).flatten(), minlength=SPEC.vocab_size)
    assert not seen[expected == 0].any()
    spread = (expected * (1 - expected) / draws).sqrt()
    assert ((seen / draws - expected).abs() <= 5 * spread).all()


def test_a_stop_token_ends_its_own_sequence_only(model: Decoder) -> None:
    sampling = Sampling(max_tokens=20, temperature=1.5, seed=7)
    free = tokens(model, sampling, count=4)
    stop = free[0][3]
    steps = list(generate(model, PROMPT, sampling, stop_ids=frozenset({stop}), count=4))
    for index, row in enumerate(free):
        until = row.index(stop) if stop in row else len(row)
        made = [step[index] for step in steps]
        assert made == (row[:until] + [None] * 20)[: len(made)]


def test_it_ends_with_the_models_positions(model: Decoder) -> None:
    assert len(tokens(model, Sampling(max_tokens=1000, temperature=0))[0]) == SPEC.max_positions - len(PROMPT)


@pytest.mark.parametrize(
    ("prompt", "count", "expected"),
    [
        ([], 1, "prompt is empty"),
        ([1] * 64, 1, "64 tokens long and the model has 64 positions"),
        ([1, 61], 1, "token 61, but the model's vocabulary ends at 60"),
        ([1, -1], 1, "token -1"),
        ([1], 0, "count is 0"),
    ],
)
def test_bad_prompts_are_refused_before_the_first_step(
    model: Decoder, prompt: list[int], count: int, expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        generate(model, prompt, GREEDY, stop_ids=NEVER, count=count)


@pytest.mark.parametrize(
    "setting",
    [
        {"max_tokens": 0},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"seed": -1},
    ],
)
def test_bad_settings_are_refused(setting: dict) -> None:
    with pytest.raises(UserError, match=f"{next(iter(setting))} is "):
        Sampling(**setting)


def test_text_comes_in_whole_characters_and_one_stream_at_a_time() -> None:
    tokenizer = train_tokenizer(["hello 日本 👍🏽"] * 3, 260)
    torch.manual_seed(0)
    model = Decoder(replace(SPEC, vocab_size=260))
    loaded = LoadedModel(model, tokenizer, "tiny")
    sampling = Sampling(max_tokens=40, temperature=1.0, seed=1)
    prompt = tokenizer.encode("日本")
    steps = list(generate(model, prompt, sampling, stop_ids=tokenizer.stop_ids, count=2))
    expected = [
        tokenizer.decode([token for token in column if token is not None]) for column in zip(*steps, strict=True)
    ]
    streams = continue_text(loaded, "日本", sampling, count=2)
    assert ["".join(stream) for stream in streams] == expected
    assert "".join(continue_text(loaded, "", sampling)[0])
    assert "".join(continue_text(loaded, "hello", sampling, chat=True)[0])
    with pytest.raises(UserError, match="tiny has no tokenizer"):
        continue_text(LoadedModel(model, None, "tiny"), "hello", sampling)
