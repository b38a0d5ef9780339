"""Generation: one prefill of the prompt, then one decoded token per sequence and step through the key/value cache.

The prompt is prefilled once for any number of continuations. Sampling uses a torch.Generator of its own: a seed gives
the same tokens every time, and the global random state is untouched. Prompt and continuation fit the model's positions:
a prompt that fills them is refused, a continuation that reaches them ends.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.layers.cache import KeyValueCache
from tightfit.models.loading import LoadedModel
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import Tokenizer

NOT_FINITE = "its weights are damaged, or too large for the number format; load another checkpoint, or in float32"
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. Temperature 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    max_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.temperature <= 100:
            raise UserError(f"temperature is {self.temperature}; it must lie between 0 (greedy) and 100")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; it must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (off)")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise UserError(f"seed is {self.seed}; it must lie between 0 and {LARGEST_SEED}")


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution sampled from, given logits [..., V]: temperature, then top-k, then top-p (nucleus) of those."""
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        best, index = scores.topk(sampling.top_k)
        scores = torch.full_like(scores, -torch.inf).scatter(-1, index, best)
    probs = scores.softmax(-1)
    if sampling.top_p < 1:
        ordered, index = probs.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        kept = torch.zeros_like(probs).scatter(-1, index, ordered.masked_fill(before >= sampling.top_p, 0))
        probs = kept / kept.sum(-1, keepdim=True)
    return probs


def generate(
    model: Decoder, prompt_ids: list[int], sampling: Sampling, *, stop_ids: frozenset[int], count: int = 1
) -> Iterator[list[int | None]]:
    """Yields, per step, the next token of each of `count` continuations; None for those that reached a stop id."""
    if count < 1:
        raise UserError(f"count is {count}; it must be at least 1")
    check_prompt(prompt_ids, model.spec)
    return _decode(model, prompt_ids, sampling, stop_ids, count)


def check_prompt(prompt_ids: list[int], spec: ModelSpec) -> None:
    """Refuse a prompt that a model of this shape cannot continue."""
    if not prompt_ids:
        raise UserError("the prompt is empty; begin with the model's first or end-of-text token")
    if bad := [token for token in prompt_ids if not 0 <= token < spec.vocab_size]:
        raise UserError(f"the prompt has token {bad[0]}, but the model's vocabulary ends at {spec.vocab_size - 1}")
    if len(prompt_ids) >= spec.max_positions:
        raise UserError(
            f"the prompt is {len(prompt_ids)} tokens long and the model has {spec.max_positions} positions; shorten it"
        )


def _decode(
    model: Decoder, prompt_ids: list[int], sampling: Sampling, stop_ids: frozenset[int], count: int
) -> Iterator[list[int | None]]:
    device = model.embed.weight.device
    generator = torch.Generator(device).manual_seed(sampling.seed)
    steps = min(sampling.max_tokens, model.spec.max_positions - len(prompt_ids))
    logits, cache = _prefill(model, prompt_ids, count, len(prompt_ids) + steps)
    finished = [False] * count
    for step in range(steps):
        sampled = _sample(logits, sampling, generator)
        tokens = sampled.flatten().tolist()
        finished = [done or token in stop_ids for done, token in zip(finished, tokens, strict=True)]
        if all(finished):
            return
        yield [None if done else token for done, token in zip(finished, tokens, strict=True)]
        if step + 1 < steps:
            logits = _next_logits(model, sampled, cache)


@torch.inference_mode()
def _prefill(model: Decoder, prompt_ids: list[int], count: int, capacity: int) -> tuple[Tensor, KeyValueCache]:
    """Logits after the prompt [count, V], and a cache with the prompt's keys and values in every row."""
    weight = model.embed.weight
    prompt = KeyValueCache(model.spec, 1, len(prompt_ids) if count > 1 else capacity, weight.device, weight.dtype)
    logits = _next_logits(model, torch.tensor([prompt_ids], device=weight.device), prompt)
    if count == 1:
        return logits, prompt
    cache = KeyValueCache(model.spec, count, capacity, weight.device, weight.dtype)
    cache.storage[:, :, :, :, : prompt.length] = prompt.storage
    cache.advance(prompt.length)
    return logits.expand(count, -1), cache


@torch.inference_mode()
def _next_logits(model: Decoder, tokens: Tensor, cache: KeyValueCache) -> Tensor:
    """Logits [B, V] of the token after `tokens` [B, T]."""
    logits = model(tokens, cache=cache, last_only=True).logits
    return logits[:, -1]


@torch.inference_mode()
def check_numbers(model: Decoder) -> None:
    """Refuse a model whose weights are damaged; one token shows it, as a value that is no number spreads to all."""
    _refuse_nan(model(torch.zeros(1, 1, dtype=torch.long, device=model.embed.weight.device)).logits)


def _refuse_nan(logits: Tensor) -> None:
    if bool(logits.isnan().any()):
        raise UserError(f"the model computes values that are no numbers: {NOT_FINITE}")


@torch.inference_mode()
def _sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token per row of `logits`, [B, 1]."""
    _refuse_nan(logits)
    if sampling.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial(probabilities(logits, sampling), 1, generator=generator)


@torch.inference_mode()
def sample_rows(
    model: Decoder, first: Tensor, length: int, sampling: Sampling, progress: Callable[[int], None] = lambda done: None
) -> Tensor:
    """Token rows [B, length] that begin with the tokens `first` [B]; an end-of-text token does not end its row.

    `progress` is called with the number of tokens per row so far.
    """
    weight = model.embed.weight
    generator = torch.Generator(weight.device).manual_seed(sampling.seed)
    cache = KeyValueCache(model.spec, len(first), length, weight.device, weight.dtype)
    rows = [first.to(weight.device)[:, None]]
    while len(rows) < length:
        rows.append(_sample(_next_logits(model, rows[-1], cache), sampling, generator))
        progress(len(rows))
    return torch.cat(rows, 1).cpu()


def continue_text(
    loaded: LoadedModel, text: str, sampling: Sampling, *, count: int = 1, chat: bool = False
) -> list[Iterator[str]]:
    """`count` continuations of `text` as streams of text; with `chat`, replies to it as a user's message.

    All of them advance together: reading one stream buffers the tokens of the others.
    """
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise UserError(f"{loaded.source} has no tokenizer, so it cannot continue text")
    steps = generate(
        loaded.model, prompt_tokens(tokenizer, text, chat=chat), sampling, stop_ids=tokenizer.stop_ids, count=count
    )
    return [_detokenized(tokenizer, tokens) for tokens in _per_sequence(steps, count)]


def prompt_tokens(tokenizer: Tokenizer, text: str, *, chat: bool) -> list[int]:
    """Token ids of a prompt: in the chat template, or after the beginning-of-text token."""
    if chat:
        rendered = tokenizer.render_chat([{"role": "user", "content": text}], add_generation_prompt=True)
        return tokenizer.encode(rendered, parse_special=True)
    ids = tokenizer.encode(text)
    first = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    return ids if first is None or (ids and not tokenizer.adds_bos) else [first, *ids]


def _per_sequence(steps: Iterator[list[int | None]], count: int) -> list[Iterator[int]]:
    """One iterator per sequence over shared `steps`; tokens of sequences that are not being read are buffered."""
    buffers: list[deque[int]] = [deque() for _ in range(count)]

    def tokens_of(own: deque[int]) -> Iterator[int]:
        while True:
            while own:
                yield own.popleft()
            try:
                step = next(steps)
            except StopIteration:
                return
            for buffer, token in zip(buffers, step, strict=True):
                if token is not None:
                    buffer.append(token)

    return [tokens_of(own) for own in buffers]


def _detokenized(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Streams the text of `tokens`; bytes of an incomplete UTF-8 character are held back."""
    ids: list[int] = []
    shown = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd") and text.startswith(shown):
            yield text[len(shown) :]
            shown = text
    text = tokenizer.decode(ids)
    if text != shown:
        yield text[len(shown) :]
