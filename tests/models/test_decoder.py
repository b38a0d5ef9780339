"""What the decoder promises beyond one sequence at a time: packed documents, a cache, construction without memory."""

from typing import Any

import pytest
import torch

from tests.covering import sampled
from tests.models.huggingface.reference import BATCH, CASES, LENGTH, distance, pair
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.layers.cache import KeyValueCache
from tightfit.models.presets import preset, preset_names

LENGTHS = (9, 3, 12)
# Their frequencies depend on the longest sequence seen so far, which a growing cache changes.
GROWING = ("llama-dynamic-beyond", "phi3-longrope-long")


def documents() -> torch.Tensor:
    numbers = torch.repeat_interleave(torch.tensor([4, 0, 7]), torch.tensor(LENGTHS))
    return torch.stack([numbers, torch.zeros(LENGTH, dtype=torch.long)])


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt2", "qwen2_moe", "phi3-longrope-short"])
def test_packed_documents_are_computed_as_if_alone(name: str) -> None:
    both = pair(name)
    with torch.no_grad():
        packed = both.ours(both.tokens, documents=documents()).logits
        alone = [both.ours(part).logits for part in both.tokens[:1].split(LENGTHS, dim=1)]
        assert distance(packed[:1], torch.cat(alone, 1)) < 1e-5
        assert distance(packed[1:], both.ours(both.tokens[1:]).logits) < 1e-5


def test_packed_rows_choose_longrope_factors_by_the_longest_document_not_the_row() -> None:
    config = CASES["phi3-longrope-short"] | {"original_max_position_embeddings": max(LENGTHS)}
    both = pair("phi3-longrope-short")
    from tightfit.models.huggingface.config import spec_from_config

    model = Decoder(spec_from_config(config, "test"))
    model.load_state_dict(both.ours.state_dict())
    with torch.no_grad():
        packed = model(both.tokens[:1], documents=documents()[:1]).logits
        alone = [model(part).logits for part in both.tokens[:1].split(LENGTHS, dim=1)]
    assert distance(packed, torch.cat(alone, 1)) < 1e-5


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt2"])
def test_gradients_do_not_cross_document_borders(name: str) -> None:
    both = pair(name)
    seen: list[torch.Tensor] = []
    hook = both.ours.embed.register_forward_hook(lambda module, inputs, output: seen.append(output))
    logits = both.ours(both.tokens, documents=documents()).logits
    hook.remove()
    (grad,) = torch.autograd.grad(logits[0, LENGTHS[0] : LENGTHS[0] + LENGTHS[1]].square().sum(), seen)
    inside = torch.zeros(LENGTH, dtype=torch.bool)
    inside[LENGTHS[0] : LENGTHS[0] + LENGTHS[1]] = True
    assert grad[0, inside].abs().sum() > 0
    assert grad[0, ~inside].abs().max() == 0
    assert grad[1].abs().max() == 0


MIXED = [10, 1, 1, 5, 7]
# One by one from nothing where layers differ in what they keep; frequencies and biases show in mixed steps.
STEPS = [
    *((name, MIXED) for name in CASES if name not in GROWING),
    *((name, [1] * LENGTH) for name in ("llama", "mistral", "qwen2_moe-windowed", "gemma2", "gemma3", "phi3", "gpt2")),
]


@sampled(3)
@pytest.mark.parametrize(("name", "steps"), STEPS, ids=lambda value: value if isinstance(value, str) else len(value))
def test_cache_gives_what_the_full_forward_gives(name: str, steps: Any) -> None:
    both = pair(name)
    cache = KeyValueCache(both.ours.spec, BATCH, LENGTH, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        full = both.ours(both.tokens).logits
        parts = [both.ours(part, cache=cache).logits for part in both.tokens.split(steps, dim=1)]
    assert distance(torch.cat(parts, 1), full) < 1e-5
    assert cache.length == LENGTH


@pytest.mark.parametrize("name", GROWING)
def test_cache_at_full_length_gives_what_the_full_forward_gives(name: str) -> None:
    both = pair(name)
    cache = KeyValueCache(both.ours.spec, BATCH, LENGTH, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        last = both.ours(both.tokens, cache=cache, last_only=True).logits
        assert distance(last, both.ours(both.tokens).logits[:, -1:]) < 1e-6


def test_documents_and_cache_exclude_each_other() -> None:
    both = pair("llama")
    cache = KeyValueCache(both.ours.spec, BATCH, 2 * LENGTH, torch.device("cpu"), torch.float32)
    both.ours(both.tokens, cache=cache)
    with pytest.raises(ValueError, match="documents"):
        both.ours(both.tokens, cache=cache, documents=documents())


@sampled(4)
@pytest.mark.parametrize("name", [name for name in preset_names() if preset(name).layers <= 36])
def test_parameter_count_of_the_decoder_is_the_spec_s(name: str) -> None:
    """Deeper ones only repeat layers; what they add up to is in test_presets.py."""
    spec = preset(name)
    with torch.device("meta"):
        model = Decoder(spec)
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.params()
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", [name for name in preset_names() if name.startswith("tiny-")])
def test_initialised_model_predicts_nothing_in_particular(name: str) -> None:
    torch.manual_seed(0)
    spec = preset(name)
    model = Decoder(spec)
    init_weights(model)
    tokens = torch.randint(0, spec.vocab_size, (2, 40))
    loss = model(tokens, tokens.roll(-1, 1)).loss.item() / tokens.numel()
    uniform = torch.tensor(float(spec.vocab_size)).log().item()
    # Logits of variance one cost half a nat; Gemma's large tied embeddings at first favour the token they stand for.
    assert uniform < loss < uniform + 1.5


def test_a_divisor_divides_the_loss_and_its_gradients() -> None:
    both, labels = pair("llama"), pair("llama").tokens.roll(-1, 1)
    weights = list(both.ours.parameters())
    summed, divided = (both.ours(both.tokens, labels, divisor=divisor).loss for divisor in (None, 7.0))
    assert torch.allclose(divided, summed / 7)
    wanted, found = torch.autograd.grad(summed / 7, weights), torch.autograd.grad(divided, weights)
    assert all(distance(a, b) < 1e-5 for a, b in zip(found, wanted, strict=True))
