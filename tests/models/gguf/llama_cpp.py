"""llama.cpp itself, as the package xllamacpp brings it: the other side of every comparison about GGUF.

It is a server inside the process that speaks HTTP on a free local port. Keys and values are kept in float32, and its
flash attention, which reads them in 16 bits all the same, is off: differences are float32's rounding only.
"""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xllamacpp


class LlamaCpp:
    """A loaded GGUF model."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.port = 256, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = params.n_threads_http = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.warmup, params.verbosity, params.fit_params = False, 0, False
        self.server = xllamacpp.Server(params)

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of `text`, nothing added."""
        return self._post("/tokenize", content=text, add_special=False, parse_special=parse_special)["tokens"]

    def logprobs(self, prompt: list[int], vocab_size: int) -> list[float]:
        """The log probability of every token after `prompt`."""
        found = self.likeliest(prompt, vocab_size)
        return [found[index] for index in range(vocab_size)]

    def likeliest(self, prompt: list[int], count: int) -> dict[int, float]:
        """The `count` likeliest tokens after `prompt`, with their log probabilities."""
        answer = self._complete(prompt, n_predict=1, n_probs=count)
        return {row["id"]: row["logprob"] for row in answer["completion_probabilities"][0]["top_logprobs"]}

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The `count` tokens that follow `prompt`, each the likeliest."""
        return self._complete(prompt, n_predict=count, return_tokens=True, ignore_eos=True)["tokens"]

    def _complete(self, prompt: list[int], **settings: Any) -> Any:
        return self._post("/completion", prompt=prompt, temperature=0, cache_prompt=False, **settings)

    def _post(self, path: str, **body: Any) -> Any:
        url, headers = self.server.listening_address + path, {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
            return json.loads(answer.read())


@contextmanager
def llama_cpp(path: Path) -> Iterator[LlamaCpp]:
    """llama.cpp with the model in `path`, for a while."""
    loaded = LlamaCpp(path)
    try:
        yield loaded
    finally:
        del loaded.server
