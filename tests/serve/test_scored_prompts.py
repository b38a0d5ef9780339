"""Log probabilities of prompts (echo), where tokens begin in a text, and what a prompt counts as."""

from typing import Any

import openai
import pytest
import torch

from tests.serve.running import CONFIG, Running
from tests.serve.test_server import post
from tightfit.models.decoder import Decoder
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.serve.http.text_offsets import TextOffsets
from tightfit.serve.prompt_logprobs import ROWS

PROMPT = "the quick brown fox jumps over the lazy dog"
ASKED: Any = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 2, "temperature": 0}


def test_an_echoed_prompt_has_its_log_probabilities(
    client: openai.OpenAI, model: Decoder, tokenizer: Tokenizer
) -> None:
    """Those of one forward pass over prompt and answer, whose tokens follow; nothing is known of the first."""
    made = client.completions.create(**ASKED, max_tokens=5).choices[0]
    told = made.logprobs
    assert told is not None
    ids = tokenizer.encode(PROMPT)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    truth = logits.log_softmax(-1)
    wanted = [float(truth[place, token]) for place, token in enumerate(ids[1:])]
    assert told.token_logprobs is not None
    assert told.token_logprobs[0] is None
    assert told.token_logprobs[1 : len(ids)] == pytest.approx(wanted, rel=1e-4)
    assert told.tokens is not None
    assert "".join(told.tokens[: len(ids)]) == PROMPT
    assert made.text.startswith(PROMPT)
    assert told.top_logprobs is not None
    assert [max(top.values()) for top in told.top_logprobs[1 : len(ids)]] == pytest.approx(
        truth[:-1].max(-1).values.tolist(), rel=1e-4
    )
    lengths = {len(each) for each in (told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset or [])}
    assert lengths == {len(ids) + 5}


def test_no_token_need_be_asked_for(client: openai.OpenAI, server: Running, tokenizer: Tokenizer) -> None:
    """Clients that measure texts ask for none, or for one that they leave away."""
    whole = client.completions.create(**ASKED, max_tokens=3).choices[0].logprobs
    made = client.completions.create(**ASKED | {"prompt": [PROMPT, "a"], "n": 2}, max_tokens=0)
    assert [choice.text for choice in made.choices] == [PROMPT, PROMPT, "a", "a"]
    assert {choice.finish_reason for choice in made.choices} == {"length"}
    told, length = made.choices[1].logprobs, len(tokenizer.encode(PROMPT))
    assert told is not None
    assert whole is not None
    assert (told.tokens, told.text_offset) == (
        (whole.tokens or [])[:length],
        (whole.text_offset or [])[:length],
    )
    assert made.usage is not None
    assert (made.usage.completion_tokens, made.usage.prompt_tokens) == (0, length + 1)
    for more in (
        b'"max_tokens": 0, "stream": true, "echo": true',
        b'"max_tokens": 0',
        b'"max_tokens": -1, "echo": true',
    ):
        status, answer = post(server, "/v1/completions", b'{"prompt": "a", ' + more + b"}")
        assert (status, "max_tokens" in answer["error"]["message"]) == (400, True)
    assert post(server, "/v1/completions", b'{"prompt": [300], "max_tokens": 0, "echo": true}')[0] == 400


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    asked = ASKED | {"prompt": [PROMPT, "numbers such as"], "n": 2, "max_tokens": 4}
    whole = client.completions.create(**asked)
    parts: dict[int, dict[str, list[Any]]] = {}
    for chunk in client.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        if choice.logprobs is not None:
            mine = parts.setdefault(choice.index, {})
            for name, values in choice.logprobs.model_dump(exclude_none=True).items():
                mine.setdefault(name, []).extend(values)
    for choice in whole.choices:
        assert choice.logprobs is not None
        told = choice.logprobs.model_dump()
        for name in ("tokens", "text_offset"):
            assert parts[choice.index][name] == told[name]
        assert len(parts[choice.index]["top_logprobs"]) == len(told["top_logprobs"])
        assert parts[choice.index]["token_logprobs"][1:] == pytest.approx(told["token_logprobs"][1:], rel=1e-4)


def test_long_prompts_are_scored_piece_by_piece(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """The same numbers as the same tokens have at the beginning of less."""
    ids = (tokenizer.encode(PROMPT) * 20)[: 2 * ROWS + 3]
    scored = [
        client.completions.create(**ASKED | {"prompt": prompt}, max_tokens=0).choices[0].logprobs
        for prompt in (ids, ids[:ROWS])
    ]
    long, short = ((each.token_logprobs or [])[1:] if each is not None else [] for each in scored)
    assert len(long) == len(ids) - 1
    assert long[: ROWS - 1] == pytest.approx(short, rel=1e-4)


def test_offsets_are_of_characters_whatever_tokens_cut(tokenizer: Tokenizer) -> None:
    text = "né 😀 der"
    ids = tokenizer.encode(text)
    starts = TextOffsets(tokenizer, 7).of(ids)
    for place, start in enumerate(starts):
        before = tokenizer.decode(ids[:place]).rstrip("\ufffd")
        assert start == 7 + len(before)
    special = next(iter(tokenizer.special_tokens))
    assert TextOffsets(tokenizer).of([special, ids[0], ids[1]])[:2] == [0, 0]


def test_a_prompt_of_several_answers_counts_once(client: openai.OpenAI, server: Running) -> None:
    """What its second answer finds in the cache is what the first has just stored there."""
    prompt = "pack my box with five dozen jugs"
    asked: Any = {"model": "tiny", "prompt": prompt, "n": 3, "max_tokens": 2, "temperature": 1}
    counts = []
    for _ in range(2):
        made = client.completions.create(**asked)
        assert made.usage is not None
        assert made.usage.prompt_tokens_details is not None
        counts.append(made.usage.prompt_tokens_details.cached_tokens)
    streamed = [chunk.usage for chunk in client.completions.create(**asked, stream=True, stream_options=USAGE)][-1]
    assert streamed is not None
    assert streamed.prompt_tokens_details is not None
    counts.append(streamed.prompt_tokens_details.cached_tokens)
    whole_blocks = (made.usage.prompt_tokens - 1) // CONFIG.block_size * CONFIG.block_size
    assert counts == [0, whole_blocks, whole_blocks]


USAGE: Any = {"include_usage": True}
