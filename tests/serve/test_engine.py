"""The engine around the model: seeds, stops, several answers, prefixes, guesses, beams, forms, cancelled requests."""

import json
import re
import sys
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.weights import to_hf_state
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.serve.beam import BeamSearch, likeliest_answers
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.grammar import LARGEST_TEXT, Constraints, Grammar
from tightfit.serve.requests.request import Answer, Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.sampling.acceptance import Guesses, accepted, agreeing, uniform_of
from tightfit.serve.sampling.sampler import draw, probabilities
from tightfit.serve.schedule.sequence import Sequence

CONFIG = EngineConfig(max_sequences=8, step_tokens=32, block_size=4, cache_bytes=2**20)
PROMPT = [5, 17, 3, 42, 8, 99, 120, 7, 250, 31]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], "additionalProperties": False}
HOT = Sampling(max_tokens=12, temperature=1.5, seed=7)


def answers(engine: Engine, *samplings: Sampling, prompt: list[int] = PROMPT, count: int = 1) -> list[list[Answer]]:
    requests = [Request(id=str(i), prompt=prompt, sampling=s, count=count) for i, s in enumerate(samplings)]
    made = engine.generate(requests)
    assert engine.pool.free == engine.pool.size
    assert not engine._running
    assert not engine._of_request
    return [made[request.id] for request in requests]


def test_a_seed_repeats_whatever_else_is_in_the_batch(model: Decoder) -> None:
    alone = answers(Engine(model, None, CONFIG), HOT)[0][0].tokens
    others = [replace(HOT, seed=seed, top_k=seed * 5, max_tokens=5 + seed) for seed in range(6)]
    together = answers(Engine(model, None, CONFIG), *others, HOT)
    assert together[-1][0].tokens == alone
    assert len({tuple(each[0].tokens[:5]) for each in together}) > 3
    assert answers(Engine(model, None, CONFIG), replace(HOT, seed=8))[0][0].tokens != alone


def test_several_answers_differ_and_share_their_prompt(model: Decoder) -> None:
    engine = Engine(model, None, CONFIG)
    made = answers(engine, HOT, count=5)[0]
    assert len({tuple(each.tokens) for each in made}) == 5
    assert made[0].tokens == answers(Engine(model, None, CONFIG), HOT)[0][0].tokens
    assert [each.cached for each in made] == [0, 8, 8, 8, 8]
    greedy = answers(engine, replace(HOT, temperature=0), count=3)[0]
    assert greedy[0].tokens == greedy[1].tokens == greedy[2].tokens


def test_a_prefix_in_the_cache_changes_nothing_but_the_work(model: Decoder) -> None:
    engine = Engine(model, None, CONFIG)
    first = answers(engine, HOT)[0][0]
    again = answers(engine, HOT)[0][0]
    assert (first.cached, again.cached) == (0, 8)
    assert first.tokens == again.tokens
    without = Engine(model, None, replace(CONFIG, prefix_cache=False))
    assert [answers(without, HOT)[0][0].tokens for _ in range(2)] == [first.tokens] * 2
    assert answers(without, HOT)[0][0].cached == 0


def test_stop_ids_stop_strings_and_lengths_end_an_answer(model: Decoder, tokenizer: Tokenizer) -> None:
    free = answers(Engine(model, tokenizer, CONFIG), HOT)[0][0]
    assert (free.finish, len(free.tokens), free.text) == ("length", 12, tokenizer.decode(free.tokens))
    stop = free.tokens[5]
    ended = answers(Engine(model, tokenizer, CONFIG), replace(HOT, stop_ids=frozenset({stop})))[0][0]
    until = free.tokens.index(stop)
    assert (ended.finish, ended.tokens) == ("stop", free.tokens[: until + 1])
    assert ended.text == tokenizer.decode(free.tokens[:until])
    piece = free.text[3:6]
    cut = answers(Engine(model, tokenizer, CONFIG), replace(HOT, stop=(piece,)))[0][0]
    assert (cut.finish, cut.text) == ("stop", free.text[: free.text.index(piece)])
    longest = answers(Engine(model, tokenizer, CONFIG), replace(HOT, max_tokens=10_000))[0][0]
    assert len(longest.tokens) == model.spec.max_positions - len(PROMPT)


def test_logprobs_are_the_models(model: Decoder) -> None:
    found = answers(Engine(model, None, CONFIG), replace(HOT, logprobs=3, top_k=5))[0][0]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + found.tokens])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    for chance, token, row in zip(found.logprobs, found.tokens, logits, strict=True):
        assert chance.token == token
        assert chance.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(3)
        assert [t for t, _ in chance.top] == best.indices.tolist()
        assert [p for _, p in chance.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_cancelled_request_frees_its_blocks_at_once(model: Decoder) -> None:
    engine = Engine(model, None, CONFIG)
    engine.submit(Request(id="a", prompt=PROMPT, sampling=HOT, count=3))
    engine.submit(Request(id="b", prompt=PROMPT[::-1], sampling=HOT))
    for _ in range(3):
        engine.step()
    assert engine.pool.used > 3
    engine.cancel("a")
    engine.cancel("a")
    engine.cancel("unknown")
    assert engine.pool.used == engine.pool.blocks_for(len(PROMPT) + 2)
    while engine.has_work:
        assert all(output.request == "b" for output in engine.step())
    assert engine.pool.free == engine.pool.size


def test_cancelling_answers_that_wait_for_their_prompt_stops_nobody_else(model: Decoder) -> None:
    """The other answers to a prompt begin once it is in the cache; until then no schedule knows of them."""
    engine = Engine(model, None, CONFIG)
    engine.submit(Request(id="a", prompt=list(range(3, 103)), sampling=HOT, count=4))
    engine.step()
    engine.cancel("a")
    assert engine.scheduler.waiting == 0
    engine.submit(Request(id="b", prompt=PROMPT, sampling=HOT))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert outputs[-1].finish == "length"
    assert engine.pool.free == engine.pool.size


@pytest.mark.parametrize(
    ("prompt", "count", "expected"),
    [
        ([], 1, "prompt is empty"),
        ([1] * 512, 1, "512 tokens long; there is room for 512"),
        ([1, 300], 1, "token 300, but the model's vocabulary ends at 299"),
        ([1, -1], 1, "token -1"),
        ([1], 0, "count is 0"),
    ],
)
def test_bad_requests_are_refused(model: Decoder, prompt: list[int], count: int, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        Engine(model, None, CONFIG).submit(Request(id="a", prompt=prompt, sampling=HOT, count=count))


@pytest.mark.parametrize("async_steps", [False, True])
@pytest.mark.parametrize("speculation", ["lookup", "draft"])
def test_guessing_does_not_change_greedy_answers(
    model: Decoder, smaller: Decoder, speculation: Any, async_steps: bool
) -> None:
    prompts = [PROMPT, [9, 8, 7, 9, 8, 7, 9, 8], [1]]
    greedy = Sampling(max_tokens=30, temperature=0)
    requests = [Request(id=str(i), prompt=prompt, sampling=greedy) for i, prompt in enumerate(prompts)]
    plain = Engine(model, None, CONFIG).generate(requests)
    config = replace(CONFIG, speculation=speculation, speculated_tokens=3, async_steps=async_steps)
    for draft in (smaller, model):
        engine = Engine(model, None, config, draft=draft)
        guessed = engine.generate(requests)
        assert {key: value[0].tokens for key, value in guessed.items()} == {
            key: value[0].tokens for key, value in plain.items()
        }
        assert engine.counts.guessed > 0
        assert engine.pool.free == engine.pool.size
    if speculation == "draft":
        assert engine.counts.kept == engine.counts.guessed  # the model agrees with itself
        assert engine.counts.steps < 30


def test_a_certain_guess_keeps_the_distribution() -> None:
    """What a lookup guesses is kept or replaced so that tokens come as often as the target says."""
    chances, draws = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]), 4000
    made = []
    for seed in range(draws):
        sequence = Sequence([1, 2], Sampling(seed=seed))
        made.append(tuple(*accepted(chances, [(sequence, (1,), None)])))
    for token, chance in enumerate(chances[0].tolist()):
        found = sum(tokens[0] == token for tokens in made) / draws
        assert abs(found - chance) <= 5 * (chance * (1 - chance) / draws) ** 0.5
    after = [tokens[1] for tokens in made if tokens[0] == 1]
    assert all(len(tokens) == 1 + (tokens[0] == 1) for tokens in made)
    assert abs(after.count(2) / len(after) - 0.8) <= 5 * (0.16 / len(after)) ** 0.5


def naive(target: torch.Tensor, sequence: Sequence, guesses: Items[int], draft: torch.Tensor | None) -> list[int]:
    """Leviathan's algorithm as it is written, a guess after the other."""
    kept: list[int] = []
    for index, guess in enumerate(guesses):
        p, q = target[index], torch.eye(target.shape[1])[guess] if draft is None else draft[index]
        if uniform_of(sequence, sequence.length + index, "accept") >= float(p[guess]) / float(q[guess]):
            number = uniform_of(sequence, sequence.length + index, "resample")
            return [*kept, int(draw((p - q).clamp(min=0)[None], torch.tensor([number])))]
        kept.append(guess)
    number = uniform_of(sequence, sequence.length + len(guesses), "choose")
    return [*kept, int(draw(target[len(guesses), None], torch.tensor([number])))]


def test_guesses_of_many_are_checked_as_each_alone() -> None:
    chance = torch.Generator().manual_seed(0)

    def chances(rows: int) -> torch.Tensor:
        return torch.rand(rows, 11, generator=chance).pow(3).softmax(-1)

    asked: list[Guesses] = []
    for index in range(60):
        count = index % 4
        guesses = tuple(torch.randint(11, (count,), generator=chance).tolist())
        draft = chances(count) if index % 3 else None
        asked.append((Sequence([1] * (1 + index % 5), Sampling(seed=index)), guesses, draft))
    target = chances(sum(1 + len(guesses) for _, guesses, _ in asked))
    rows = target.split([1 + len(guesses) for _, guesses, _ in asked])
    found = accepted(target, asked)
    assert found == [naive(own, *each) for own, each in zip(rows, asked, strict=True)]
    assert {len(tokens) for tokens in found} == {1, 2, 3, 4}
    for own, each in zip(rows, asked, strict=True):
        sure = torch.eye(11)[own.argmax(-1)]
        assert agreeing(own.argmax(-1).tolist(), each[1]) == accepted(sure, [(each[0], each[1], None)])[0]


@pytest.mark.parametrize("async_steps", [False, True])
def test_guessing_keeps_the_distribution(model: Decoder, smaller: Decoder, async_steps: bool) -> None:
    """The second token has the probability that the model alone gives it, within five standard errors."""
    prompt, draws = [9, 8, 7, 9, 8, 7, 9, 8], 600
    sampling = Sampling(max_tokens=3, temperature=1.5, top_k=60)  # the second is guessed: there is room for one more
    config = replace(
        CONFIG,
        speculation="draft",
        speculated_tokens=1,
        max_sequences=100,
        step_tokens=400,
        async_steps=async_steps,
    )
    engine = Engine(model, None, config, draft=smaller)
    requests = [Request(id=str(s), prompt=prompt, sampling=replace(sampling, seed=s)) for s in range(draws)]
    made = [found[0].tokens[1] for found in engine.generate(requests).values()]
    assert 0 < engine.counts.kept < engine.counts.guessed
    with torch.no_grad():
        first = probabilities(model(torch.tensor([prompt])).logits[0, -1:], [sampling])[0]
        after = first.nonzero().flatten().tolist()
        logits = model(torch.tensor([[*prompt, token] for token in after])).logits[:, -1]
        second = first[after] @ probabilities(logits, [sampling] * len(after))
    for token in second.topk(20).indices.tolist():
        chance = float(second[token])
        assert abs(made.count(token) / draws - chance) <= 5 * (chance * (1 - chance) / draws) ** 0.5
    assert all(second[token] > 0 for token in made)


def test_beams_are_those_of_transformers(model: Decoder) -> None:
    spec = model.spec
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        intermediate_size=spec.mlp_size,
        max_position_embeddings=spec.max_positions,
        rms_norm_eps=spec.norm_eps,
        eos_token_id=None,
        bos_token_id=None,
    )
    theirs = LlamaForCausalLM(config).eval()
    theirs.load_state_dict(to_hf_state(model, spec), strict=False)
    ids = torch.tensor([PROMPT])
    wanted = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=3, max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    asked = Request(id="beam", prompt=PROMPT, sampling=Sampling(max_tokens=6))
    ((request, [found]),) = likeliest_answers(Engine(model, None, CONFIG), [asked], width=3)
    assert (request, found.finish) == (asked, "length")
    assert found.tokens == wanted[0, len(PROMPT) :].tolist()


def test_finished_beams_wait_for_better_ones() -> None:
    search = BeamSearch("beam", [1], width=1, max_tokens=9, stop_ids=frozenset({0}))
    from tightfit.serve.requests.request import TokenLogprob

    search.take([Answer(logprobs=[TokenLogprob(5, -0.1, ((5, -0.1), (0, -0.2)))])])
    assert not search.is_over
    search.take([Answer(logprobs=[TokenLogprob(0, -0.1, ((0, -0.1), (6, -4.0)))])])
    assert search.is_over
    assert search.best[0].tokens == (5, 0)


@pytest.mark.parametrize(
    ("grammar", "check"),
    [
        (Grammar("regex", "(yes|no), [0-9]{3}"), lambda text: re.fullmatch("(yes|no), [0-9]{3}", text)),
        (Grammar("lark", 'start: "a" /[b-d]+/ "e"'), lambda text: re.fullmatch("a[b-d]+e", text)),
        (
            Grammar("json_schema", json.dumps(SCHEMA)),
            lambda text: json.loads(text)["n"] in (1, 22),
        ),
    ],
)
def test_answers_have_the_form_that_is_asked_for(
    model: Decoder, tokenizer: Tokenizer, grammar: Grammar, check: object
) -> None:
    sampling = Sampling(max_tokens=200, temperature=1.0, seed=3, grammar=grammar, stop_ids=tokenizer.stop_ids)
    bent = replace(sampling, seed=4, presence_penalty=1.0)
    for made in answers(Engine(model, tokenizer, CONFIG), sampling, bent):
        if grammar.kind != "lark" or made[0].finish == "stop":  # that one may go on as long as it likes
            assert check(made[0].text), made[0].text  # type: ignore[operator]


def test_a_form_is_read_once_and_without_torchs_compiler(
    model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both took seconds in which no answer went on: importing llguidance.torch, and reading large forms per answer."""
    monkeypatch.setitem(sys.modules, "llguidance.torch", None)
    read: list[Grammar] = []
    begin = Constraints._begin
    monkeypatch.setattr(Constraints, "_begin", lambda self, grammar: read.append(grammar) or begin(self, grammar))
    grammar = Grammar("regex", "(yes|no), [0-9]{3}")
    sampling = Sampling(max_tokens=20, temperature=1.0, seed=3, grammar=grammar, stop_ids=tokenizer.stop_ids)
    engine = Engine(model, tokenizer, CONFIG)
    made = engine.generate([Request(id=name, prompt=[1], sampling=sampling, count=3) for name in "ab"])
    texts = [answer.text for answers in made.values() for answer in answers]
    assert len(set(texts)) > 1  # each stands at a place of its own
    assert all(re.fullmatch(grammar.text, text) for text in texts)
    assert read == [grammar]


def test_an_answer_whose_form_is_too_complex_to_go_on_with_is_not_called_complete(
    model: Decoder, tokenizer: Tokenizer
) -> None:
    grammar = Grammar("regex", "(a{1000}){1000}")
    sampling = Sampling(max_tokens=20, temperature=0, grammar=grammar, stop_ids=tokenizer.stop_ids)
    request = Request(id="a", prompt=[1], sampling=sampling)
    [answer] = Engine(model, tokenizer, CONFIG).generate([request])["a"]
    assert len(answer.text) < 1000
    assert answer.finish == "length"


def test_a_form_too_large_to_read_is_refused(model: Decoder, tokenizer: Tokenizer) -> None:
    """Four times the time for twice the text: 300 kB of a schema took half a minute."""
    grammar = Grammar("regex", "a" * (LARGEST_TEXT + 1))
    with pytest.raises(UserError, match=r"the regex .* has 131,073 characters; give at most 131,072"):
        Engine(model, tokenizer, CONFIG).check(Request(id="a", prompt=[1], sampling=replace(HOT, grammar=grammar)))


def test_a_bad_form_is_the_users_mistake(model: Decoder, tokenizer: Tokenizer) -> None:
    engine = Engine(model, tokenizer, CONFIG)
    bad = (Grammar("regex", "(("), Grammar("json_schema", "{"), Grammar("lark", "start: nothing"))
    endless = (Grammar("regex", r"[^\s\S]"), Grammar("json_schema", '{"$ref": "#"}'))  # which no text is
    for grammar in (*bad, *endless):
        with pytest.raises(UserError, match="is refused"):
            engine.check(Request(id="a", prompt=[1], sampling=replace(HOT, grammar=grammar)))
    assert engine.pool.free == engine.pool.size
