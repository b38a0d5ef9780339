"""The load of `tightfit bench serve` on llama.cpp with the same GGUF file: xllamacpp's server inside this process.

Keys and values are kept in float32, as ours on a CPU, and its flash attention, which reads them in 16 bits, is off.
Greedy, with as many threads as torch has, and as many slots as there are requests at a time.
"""

import json
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tightfit.errors import UserError
from tightfit.serve.peer_load import PeerRow, random_prompts


class LlamaCpp:
    """llama.cpp with the weights of a GGUF file."""

    def __init__(self, path: Path, *, slots: int = 1, positions: int = 256) -> None:
        try:
            import xllamacpp
        except ModuleNotFoundError:
            raise UserError("--peers beside a GGUF file measures llama.cpp: pip install xllamacpp") from None

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.port = slots * positions, slots, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.warmup, params.verbosity, params.fit_params = False, 0, False
        self.server: Any = xllamacpp.Server(params)

    def tokens(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` greedily chosen tokens after `prompt`."""
        asked = {"prompt": list(prompt), "n_predict": count, "temperature": 0, "cache_prompt": False}
        body = json.dumps(asked | {"return_tokens": True, "ignore_eos": True}).encode()
        url = self.server.listening_address + "/completion"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            made: list[int] = json.loads(answer.read())["tokens"]
        return made

    def close(self) -> None:
        """Give the memory back."""
        self.server = None


class LlamaCppPeer:
    """A file's model under the load of `tightfit bench serve`."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self.path, self.vocab_size = path, vocab_size

    def measured(self, at_once: int, *, prompt_tokens: int, answer_tokens: int) -> PeerRow:
        """Latency and throughput with `at_once` random prompts at a time."""
        peer = LlamaCpp(self.path, slots=at_once, positions=prompt_tokens + answer_tokens + 1)
        prompts = random_prompts(at_once, prompt_tokens, self.vocab_size)
        try:
            return PeerRow.of(at_once, answer_tokens, lambda tokens: _seconds(peer, prompts, tokens))
        finally:
            peer.close()


def _seconds(peer: LlamaCpp, prompts: list[list[int]], answer_tokens: int) -> float:
    """Seconds for answers to all prompts at a time."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        began = time.perf_counter()
        made = list(pool.map(peer.tokens, prompts, [answer_tokens] * len(prompts)))
        seconds = time.perf_counter() - began
    assert all(len(answer) == answer_tokens for answer in made)
    return seconds
