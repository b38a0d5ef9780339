"""The load of `tightfit bench serve` on `transformers` with the same weights: greedy `generate` of a batch of prompts
of one length."""

import random
import statistics
import time
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
    def of(cls, at_once: int, answer_tokens: int, first_s: float, whole_s: float) -> "PeerRow":
        """From seconds until all have their first token, and until all are answered."""
        return cls(
            at_once=at_once,
            first_token_ms=1e3 * first_s,
            between_tokens_ms=1e3 * max(0.0, whole_s - first_s) / max(1, answer_tokens - 1),
            tokens_per_second=at_once * answer_tokens / whole_s,
        )


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
        """Latency and throughput of batches of `at_once` random prompts, after a batch that is not timed."""
        self._seconds(at_once, prompt_tokens, min(2, answer_tokens))
        first = statistics.median(self._seconds(at_once, prompt_tokens, 1) for _ in range(ROUNDS))
        whole = statistics.median(self._seconds(at_once, prompt_tokens, answer_tokens) for _ in range(ROUNDS))
        return PeerRow.of(at_once, answer_tokens, first, whole)

    @torch.inference_mode()
    def _seconds(self, at_once: int, prompt_tokens: int, answer_tokens: int) -> float:
        chance = random.Random(at_once)
        prompts = [[chance.randrange(1, self.vocab_size) for _ in range(prompt_tokens)] for _ in range(at_once)]
        ids = torch.tensor(prompts, device=self.model.device)
        began = time.perf_counter()
        made = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=answer_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        made[0, -1].item()  # waits for the GPU
        return time.perf_counter() - began
