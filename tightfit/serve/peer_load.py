"""The load of `tightfit bench serve` on `transformers` with the same weights: greedy `generate` of a batch of prompts
of one length. What all peers have in common: prompts, rounds, and what comes out of their times."""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.config import config_from_spec
from tightfit.models.huggingface.weights import to_hf_state
from tightfit.models.quantized.linear import QuantizedLinear

ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class PeerRow:
    """Latency and throughput of another server with `at_once` requests at a time: medians of a few batches."""

    at_once: int
    first_token_ms: float
    between_tokens_ms: float
    tokens_per_second: float

    @classmethod
    def of(cls, at_once: int, answer_tokens: int, seconds: Callable[[int], float]) -> "PeerRow":
        """From the `seconds` that all answers of so many tokens take, after a round that is not timed."""
        seconds(min(2, answer_tokens))
        first_s, whole_s = (statistics.median(seconds(tokens) for _ in range(ROUNDS)) for tokens in (1, answer_tokens))
        return cls(
            at_once=at_once,
            first_token_ms=1e3 * first_s,
            between_tokens_ms=1e3 * max(0.0, whole_s - first_s) / max(1, answer_tokens - 1),
            tokens_per_second=at_once * answer_tokens / whole_s,
        )


def random_prompts(at_once: int, prompt_tokens: int, vocab_size: int) -> list[list[int]]:
    """The same prompts in every round."""
    chance = random.Random(at_once)
    return [[chance.randrange(1, vocab_size) for _ in range(prompt_tokens)] for _ in range(at_once)]


class TransformersPeer:
    """A model of `transformers` with the weights of a decoder."""

    def __init__(self, model: Decoder) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        if any(isinstance(part, QuantizedLinear) for part in model.modules()):
            raise UserError("--peers measures transformers on plain weights, but these are packed; leave it out")
        dtype = model.embed.weight.dtype
        no_ends = {"eos_token_id": None, "bos_token_id": None}
        config = config_from_spec(model.spec, dtype=str(dtype).removeprefix("torch.")) | no_ends
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
        theirs.load_state_dict(to_hf_state(model, model.spec), strict=False)
        theirs.tie_weights()
        self.model: Any = theirs.to(model.embed.weight.device).eval()
        self.vocab_size = model.spec.vocab_size

    def measured(self, at_once: int, *, prompt_tokens: int, answer_tokens: int) -> PeerRow:
        """Latency and throughput of batches of `at_once` random prompts."""
        prompts = torch.tensor(random_prompts(at_once, prompt_tokens, self.vocab_size), device=self.model.device)
        return PeerRow.of(at_once, answer_tokens, lambda tokens: self._seconds(prompts, tokens))

    @torch.inference_mode()
    def _seconds(self, prompts: torch.Tensor, answer_tokens: int) -> float:
        began = time.perf_counter()
        made = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=answer_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        made[0, -1].item()  # waits for the GPU
        return time.perf_counter() - began
