"""What layers with a sliding window save in serving: an engine that keeps what windows see beside one that keeps all.

Both have the same bytes of cache and get the same requests with long prompts, so that what differs is how many run at a
time; and one request alone, which tells what the second table costs. Greedy answers must be the same, token by token.
Weights are random. Rows go to benchmarks/results/serve_windows.csv.

    python -m benchmarks.serve_windows                      Gemma-3-12B and gpt-oss-20B on a GPU
    python -m benchmarks.serve_windows --tiny --device cpu  the same code on a tiny model
"""

import argparse
import gc
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.rows import RESULTS, append_row
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.resolve import resolve_spec
from tightfit.serve import budget
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling

Answers = dict[str, list[int]]


@dataclass(frozen=True)
class Load:
    """An engine's limits and the lengths of its requests."""

    config: EngineConfig
    requests: int
    prompt: int
    answer: int


LOAD = Load(
    EngineConfig(max_sequences=64, step_tokens=8192, max_length=32_768, cache_bytes=8 * 2**30, prefix_cache=False),
    requests=32,
    prompt=4096,
    answer=64,
)
TINY = Load(
    EngineConfig(max_sequences=8, step_tokens=64, max_length=256, cache_bytes=2**19, prefix_cache=False),
    requests=8,
    prompt=64,
    answer=8,
)


@contextmanager
def keeping(windows: bool) -> Iterator[None]:
    """Engines that are made in it keep only what windows see, or all positions of all layers."""
    if windows:
        yield
    else:
        with patch.object(budget, "split_window", lambda spec, length: None):
            yield


def answered(engine: Engine, load: Load, count: int) -> tuple[int, float, Answers]:
    """How many of `count` requests ran at a time, the seconds of all, and their answers."""
    draw = random.Random(7)
    prompts = [[draw.randrange(10, 200) for _ in range(load.prompt)] for _ in range(count)]
    sampling = Sampling(max_tokens=load.answer, temperature=0)
    began, at_once = time.perf_counter(), 0
    answers: Answers = {str(n): [] for n in range(count)}
    for n, prompt in enumerate(prompts):
        engine.submit(Request(id=str(n), prompt=prompt, sampling=sampling))
    while engine.has_work:
        for output in engine.step():
            answers[output.request] += output.tokens
        at_once = max(at_once, len(engine.scheduler.running))
    return at_once, time.perf_counter() - began, answers


@torch.no_grad()
def measure(name: str, load: Load, arguments: argparse.Namespace) -> None:
    """Two rows of one model."""
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = Decoder(resolve_spec(name)).to(torch.bfloat16 if arguments.device == "cuda" else torch.float32)
    init_weights(model)
    first: Answers = {}
    for windows in (True, False):
        with keeping(windows):
            engine = Engine(model, None, load.config)
        for count in (1, load.requests):  # kernels are compiled when a size is first met
            answered(engine, load, count)
        _, alone, _ = answered(engine, load, 1)
        at_once, together, answers = answered(engine, load, load.requests)
        first = first or answers
        row = {
            "model": name,
            "keeps": "what windows see" if windows else "all positions",
            "cache_gib": f"{engine.budget.cache_bytes / 2**30:.2f}",
            "blocks": engine.budget.blocks,
            "pages": engine.budget.pages,
            "requests": load.requests,
            "prompt": load.prompt,
            "answer": load.answer,
            "one_request_s": f"{alone:.3f}",
            "all_requests_s": f"{together:.3f}",
            "output_tokens_per_second": f"{load.requests * load.answer / together:.1f}",
            "at_once": at_once,
            "preemptions": engine.scheduler.preemptions,
            "same_answers": sum(first[each] == answers[each] for each in answers),
        }
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        append_row("serve_windows", row, folder=arguments.results, commit=arguments.commit)
        del engine
        gc.collect()


def main() -> None:
    """All models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", action="append", help="a preset with windows")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: a check that the script runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    chosen = arguments.model or (["tiny-gemma3", "tiny-gpt-oss"] if arguments.tiny else ["gemma-3-12b", "gpt-oss-20b"])
    for name in chosen:
        measure(name, TINY if arguments.tiny else LOAD, arguments)


if __name__ == "__main__":
    main()
