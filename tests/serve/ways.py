"""Ways of running an engine that may change nothing of its answers, for a model on any device: guesses, giving way,
penalties and forms beside plain requests.

Models are in float32. Products of other row counts round otherwise, so greedy answers are compared up to ties: where
two part, both tokens have to score alike by the decoder itself, which knows neither cache nor batches.
"""

import re
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.memory.formulas.serving import cache_bytes_per_token
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.adapter import Adapter, LowRank
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.grammar import Grammar
from tightfit.serve.requests.request import Answer, Request
from tightfit.serve.requests.sampling import Sampling

ROOMY = EngineConfig(max_sequences=8, step_tokens=128, cache_bytes=2**27)
PROMPTS = [[3 + (7 * i + j) % 13 for j in range(5 + 30 * i)] for i in range(6)]
"""Patterns that repeat, so that looking them up finds something."""
ANSWER = 24
TIE = 1e-3
"""Of the spread of logits: a hundred times what float32 rounds them by, a thousandth of what chance would leave."""


def greedy(**settings: Any) -> Sampling:
    return Sampling(**{"max_tokens": ANSWER, "temperature": 0, **settings})


def answers(engine: Engine, *samplings: Sampling, adapters: Sequence[str | None] = (None,)) -> list[Answer]:
    """Of all prompts at once, each with the next of `samplings` and of `adapters`."""
    requests = [
        Request(id=str(i), prompt=prompt, sampling=samplings[i % len(samplings)], adapter=adapters[i % len(adapters)])
        for i, prompt in enumerate(PROMPTS)
    ]
    made = engine.generate(requests)
    assert engine.pool.free == engine.pool.size
    return [made[request.id][0] for request in requests]


def tokens(engine: Engine, *samplings: Sampling, adapters: Sequence[str | None] = (None,)) -> list[list[int]]:
    return [answer.tokens for answer in answers(engine, *samplings, adapters=adapters)]


def logits_before(model: Decoder, prompt: list[int], answer: list[int]) -> Tensor:
    """The decoder's own logits at every token of `answer`."""
    whole = torch.tensor([prompt + answer], device=model.embed.weight.device)
    with torch.no_grad():
        return model(whole).logits[0, len(prompt) - 1 : -1].float()


def assert_same(
    model: Decoder, found: list[list[int]], wanted: list[list[int]], prompts: list[list[int]] = PROMPTS
) -> None:
    """Equal, or apart at a tie from which on they are answers to something else."""
    for prompt, one, other in zip(prompts, found, wanted, strict=True):
        assert len(one) == len(other)
        parting = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        if parting is not None:
            logits = logits_before(model, prompt, other)[parting]
            apart = (logits[one[parting]] - logits[other[parting]]).abs() / logits.std()
            assert apart < TIE, f"part at {parting} by {apart:.2g}"


def check_guesses(model: Decoder, smaller: Decoder) -> None:
    """By lookup, a draft and skipped layers, greedy and where one token is all that may be drawn."""
    wanted = tokens(Engine(model, None, replace(ROOMY, async_steps=False, graphs=False)), greedy())
    ways: list[tuple[dict[str, Any], Decoder | None]] = [
        ({"speculation": "lookup"}, None),
        ({"speculation": "skip", "skipped_layers": 1}, None),
        ({"speculation": "draft"}, smaller),
        ({"speculation": "draft"}, model),
    ]
    for (changes, draft), apart in product(ways, (None, {"async_steps": False, "graphs": False})):
        for samplings in ([greedy()], [greedy(temperature=1.0, top_k=1, seed=3)], [greedy(), greedy(top_k=1, seed=3)]):
            config = replace(ROOMY, speculated_tokens=3, **changes, **(apart or {}))
            engine = Engine(model, None, config, draft=draft)
            assert_same(model, tokens(engine, *samplings), wanted)
            assert engine.counts.guessed > 0, changes
            if draft is model:
                assert engine.counts.kept > 0.9 * engine.counts.guessed, "it guesses what it will say"


def check_giving_way(model: Decoder) -> None:
    """A cache that does not hold all: what gives way is computed again, or comes back from the host."""
    wanted = tokens(Engine(model, None, replace(ROOMY, async_steps=False, graphs=False)), greedy())
    block_bytes = ROOMY.block_size * cache_bytes_per_token(model.spec, model.embed.weight.element_size(), "model")
    tight = replace(ROOMY, cache_bytes=20 * block_bytes, prefix_cache=False)
    for host_bytes in (0, 2**26):
        for config in (tight, replace(tight, graphs=False, async_steps=False)):
            engine = Engine(model, None, replace(config, host_bytes=host_bytes))
            assert_same(model, tokens(engine, greedy()), wanted)
            assert engine.scheduler.preemptions > 0
            if engine.host is not None:
                assert engine.host.restored_count > 0
                assert engine.host.used_bytes == 0
            assert (engine.host is None) == (host_bytes == 0)


def random_adapter(model: Decoder, rank: int, parts: tuple[str, ...]) -> Adapter:
    """One that changes what is said."""
    device, changes = model.embed.weight.device, {}
    for name, linear in model.layers.named_modules():
        if name.endswith(parts) and isinstance(linear, nn.Linear):
            down = torch.randn(rank, linear.in_features, device=device)
            up = torch.randn(linear.out_features, rank, device=device)
            size = linear.weight.norm() / (up @ down).norm()
            changes[f"layers.{name}"] = LowRank(down, 0.5 * size * up)
    return Adapter("random", rank, changes)


def check_adapters(model: Decoder) -> None:
    """Several in one batch, of different ranks and on different projections: each answers as if it were merged."""
    torch.manual_seed(0)
    first, second = random_adapter(model, 4, ("q", "v", "o")), random_adapter(model, 9, ("q", "gate", "down"))
    asked = (None, "first", "second", "first")
    wanted: dict[str | None, list[list[int]]] = {}
    merged: dict[str | None, Decoder] = {}
    for name, adapter in ((None, None), ("first", first), ("second", second)):
        made: Any = deepcopy(model)
        with torch.no_grad():
            for changed, change in (adapter.changes if adapter else {}).items():
                made.get_submodule(changed).weight += change.up @ change.down
        merged[name], wanted[name] = made, tokens(Engine(made, None, ROOMY), greedy())
    assert not any(a == b for pair in combinations(wanted.values(), 2) for a, b in zip(*pair, strict=True))
    adapters = {"first": first, "second": second}
    for config in (ROOMY, replace(ROOMY, async_steps=True), replace(ROOMY, async_steps=False, graphs=False)):
        for sampling in (greedy(), greedy(temperature=1.0, top_k=1, seed=3)):
            engine = Engine(model, None, config, adapters=adapters)
            found = tokens(engine, sampling, adapters=asked)
            for index, each in enumerate(found):
                name = asked[index % len(asked)]
                assert_same(merged[name], [each], wanted[name][index : index + 1], PROMPTS[index : index + 1])


def check_penalties(model: Decoder) -> None:
    """Beside plain requests, which they leave alone; every token is the best after penalties written out by hand."""
    plain = tokens(Engine(model, None, replace(ROOMY, async_steps=False, graphs=False)), greedy())
    bent = greedy(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    found = tokens(Engine(model, None, ROOMY), greedy(), bent)
    for prompt, answer in list(zip(PROMPTS, found, strict=True))[1::2]:
        assert_best(logits_before(model, prompt, answer), prompt, answer, bent)
    assert_same(model, [each[i % 2] for i, each in enumerate(zip(found, plain, strict=True))], plain)
    assert found[1::2] != plain[1::2]


def assert_best(logits: Tensor, prompt: list[int], answer: list[int], bent: Sampling) -> None:
    """By the formulas of CTRL and OpenAI, a token after the other."""
    for at, (row, token) in enumerate(zip(logits, answer, strict=True)):
        said = Counter(answer[:at])
        for seen in {*prompt, *said}:
            row[seen] = row[seen] / bent.repetition_penalty if row[seen] > 0 else row[seen] * bent.repetition_penalty
        for seen, count in said.items():
            row[seen] -= bent.presence_penalty + bent.frequency_penalty * count
        assert (row.max() - row[token]) / row.std() < TIE, at


def check_forms(model: Decoder, tokenizer: Tokenizer) -> None:
    """Beside plain requests, which they leave alone."""
    plain = tokens(Engine(model, tokenizer, replace(ROOMY, async_steps=False, graphs=False)), greedy())
    form = Grammar("regex", "(yes|no), [0-9]{3}")
    formed = Sampling(max_tokens=40, temperature=1.0, seed=3, grammar=form, stop_ids=tokenizer.stop_ids)
    found = answers(Engine(model, tokenizer, ROOMY), greedy(), formed)
    for answer in found[1::2]:
        assert re.fullmatch(form.text, answer.text), answer.text
    assert_same(model, [(answer.tokens, plain[i])[i % 2] for i, answer in enumerate(found)], plain)
