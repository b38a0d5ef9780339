"""Speculative decoding against plain decoding, in one run on the same requests: kept guesses, tokens/s and their ratio.

Ways to guess: a draft model, prompt lookup, and the model itself without some of its layers. Answers are greedy, so all
ways say the same up to rounding; how many do is in the rows. One stream, and eight at a time.

- SmolLM2's own weights from its GGUF file, on a CPU. "repeating" prompts ask for Python code of the standard library to
  be said again, as edits and summaries do; "open" ones ask for something new. SmolLM2-135M is the smallest of its
  family, so the draft is made of its own layers, the ones that skipping keeps: it guesses what skipping guesses, and
  runs as a model of its own.
- A shape with random weights (`--shape`), where how often guesses are kept is forced: the layers that the draft lacks
  add nothing to the residual stream (their output projections are zero, and are multiplied by all the same), so draft
  and model agree; then a share of 1 − `--keep` of the guesses is replaced by other tokens before they are checked.

Rows go to benchmarks/results/serve_speculation.csv.

    python -m benchmarks.serve_speculation
    python -m benchmarks.serve_speculation --shape llama-3.1-8b --device cuda --keep 0.8 --skip 24
    python -m benchmarks.serve_speculation --shape tiny-llama --keep 0.8 --skip 1 --answer 8
"""

import argparse
import inspect
import random
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.rows import RESULTS, append_row
from tightfit.models.decoder import Decoder
from tightfit.models.generate import prompt_tokens
from tightfit.models.initialisation import init_weights
from tightfit.models.loading import SMOLLM2, load_model
from tightfit.models.resolve import resolve_spec
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.schedule.scheduler import Chunk
from tightfit.serve.schedule.sequence import Sequence
from tightfit.serve.speculation.proposers import Proposer
from tightfit.serve.speculation.skipping import kept_layers

STREAMS = (1, 8)
WAYS = ("lookup", "skip", "draft")
CACHE_BYTES = {"cpu": 2**28, "cuda": 2**32}
SOURCES = (
    "textwrap.dedent",
    "shlex.join",
    "textwrap.shorten",
    "heapq.merge",
    "statistics.median_low",
    "difflib.get_close_matches",
    "fnmatch.filter",
    "string.capwords",
)
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse.",
    "Explain how bread is made.",
    "What should I see in Rome in two days?",
    "Describe the life of a honey bee.",
    "Give advice to somebody who starts to learn the piano.",
    "How does a bicycle stay upright?",
    "Write a letter to a friend who moved away.",
)


@dataclass
class Subject:
    """A model, a draft made of some of its layers, and prompts by their kind."""

    name: str
    model: Decoder
    draft: Decoder
    prompts: dict[str, list[list[int]]]
    keep: float | None = None


class Spoiled:
    """A proposer whose guesses are replaced by other tokens but for a share of `keep`."""

    def __init__(self, inner: Proposer, keep: float, vocab_size: int) -> None:
        self.inner, self.keep, self.vocab_size, self.random = inner, keep, vocab_size, random.Random(0)

    def propose(self, chunks: Items[Chunk]) -> dict[Sequence, Tensor]:
        """What the inner one guesses, some of it spoiled; chances are certain, as answers are greedy."""
        drawn = self.inner.propose(chunks)
        for chunk in chunks:
            for index, token in enumerate(chunk.proposal):
                if self.random.random() >= self.keep:
                    chunk.proposal[index] = other = (token + 1) % self.vocab_size
                    if chunk.sequence in drawn:
                        drawn[chunk.sequence][index] = 0.0
                        drawn[chunk.sequence][index, other] = 1.0
        return drawn


def draft_of(model: Decoder, skipped: int) -> Decoder:
    """A model of the layers that skipping keeps; it shares their weights."""
    kept = kept_layers(model.spec.layers, skipped)
    with torch.device("meta"):
        draft = Decoder(replace(model.spec, layers=len(kept)))
    draft.layers = torch.nn.ModuleList(model.layers[index] for index in kept)
    draft.embed, draft.norm, draft.head, draft.positions = model.embed, model.norm, model.head, model.positions
    return draft.eval()


def real_subject(skipped: int) -> Subject:
    """SmolLM2 as its package brings it, asked in its chat form."""
    loaded = load_model(SMOLLM2, device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    again = [f"Repeat this Python code exactly:\n```python\n{source_of(name)}\n```" for name in SOURCES]
    kinds = {"repeating": again, "open": list(QUESTIONS)}
    prompts = {kind: [prompt_tokens(tokenizer, text, chat=True) for text in texts] for kind, texts in kinds.items()}
    return Subject(SMOLLM2, loaded.model, draft_of(loaded.model, skipped), prompts)


def source_of(name: str) -> str:
    """The code of a function of the standard library, its beginning."""
    module, function = name.split(".")
    return "\n".join(inspect.getsource(getattr(__import__(module), function)).splitlines()[:24])


@torch.no_grad()
def random_subject(preset: str, device: str, skipped: int, keep: float) -> Subject:
    """Random weights, where the layers that are skipped add nothing."""
    torch.manual_seed(0)
    spec = resolve_spec(preset)
    with torch.device(device):
        model = Decoder(spec).to(torch.bfloat16 if device == "cuda" else torch.float32)
    init_weights(model, gain=1.5)
    for index in set(range(spec.layers)) - set(kept_layers(spec.layers, skipped)):
        layer: Any = model.layers[index]
        layer.attention.o.weight.zero_()
        layer.mlp.down.weight.zero_()
    chance = random.Random(0)
    rows = [[chance.randrange(spec.vocab_size) for _ in range(64)] for _ in range(max(STREAMS))]
    return Subject(preset, model, draft_of(model, skipped), {"random": rows}, keep)


def make_engine(subject: Subject, way: str, arguments: argparse.Namespace) -> Engine:
    """An engine that guesses in one of the ways."""
    longest = max(len(prompt) for prompts in subject.prompts.values() for prompt in prompts)
    settings: dict[str, Any] = {"speculation": way, "speculated_tokens": arguments.guesses}
    config = EngineConfig(
        max_sequences=max(STREAMS),
        max_length=longest + arguments.answer,
        prefix_cache=False,
        cache_bytes=CACHE_BYTES[arguments.device],
        skipped_layers=arguments.skip if way == "skip" else 0,
        **(settings if way != "none" else {}),
    )
    engine = Engine(subject.model, None, config, draft=subject.draft if way == "draft" else None)
    if engine._proposer is not None and subject.keep is not None:
        engine._proposer = Spoiled(engine._proposer, subject.keep, subject.model.spec.vocab_size)
    return engine


@dataclass
class Run:
    """What one way made of some requests."""

    seconds: float
    processor_seconds: float
    answers: list[list[int]]
    guessed: int
    kept: int
    steps: int


def run(engine: Engine, prompts: list[list[int]], answer: int) -> Run:
    """Greedy answers to all prompts at once."""
    before = replace(engine.counts)
    sampling = Sampling(max_tokens=answer, temperature=0)
    requests = [Request(id=str(i), prompt=prompt, sampling=sampling) for i, prompt in enumerate(prompts)]
    began, began_processor = time.perf_counter(), time.process_time()
    made = engine.generate(requests)
    seconds, processor_seconds = time.perf_counter() - began, time.process_time() - began_processor
    counts = engine.counts
    return Run(
        seconds,
        processor_seconds,
        [made[request.id][0].tokens for request in requests],
        counts.guessed - before.guessed,
        counts.kept - before.kept,
        counts.steps - before.steps,
    )


def one_by_one(engine: Engine, prompts: list[list[int]], answer: int, streams: int) -> Run:
    """`streams` of the prompts at a time, all of them."""
    parts = [run(engine, prompts[at : at + streams], answer) for at in range(0, len(prompts), streams)]
    return Run(
        sum(part.seconds for part in parts),
        sum(part.processor_seconds for part in parts),
        [tokens for part in parts for tokens in part.answers],
        sum(part.guessed for part in parts),
        sum(part.kept for part in parts),
        sum(part.steps for part in parts),
    )


def measure(subject: Subject, arguments: argparse.Namespace) -> None:
    """Rows for every way, kind of prompt and number of streams."""
    ways = ["none", *(way for way in arguments.ways if way != "lookup" or subject.keep is None)]
    engines = {way: make_engine(subject, way, arguments) for way in ways}
    for kind, prompts in subject.prompts.items():
        if arguments.kind not in (None, kind):
            continue
        for streams in STREAMS:
            taken = prompts[: max(streams, arguments.prompts)]
            found: dict[str, Run] = {}
            for way, engine in engines.items():
                run(engine, taken[:1], 4)  # what is made on first use is not timed
                found[way] = one_by_one(engine, taken, arguments.answer, streams)
            for way, made in found.items():
                record(subject, kind, streams, way, made, found["none"], arguments)


def record(
    subject: Subject, kind: str, streams: int, way: str, made: Run, plain: Run, arguments: argparse.Namespace
) -> None:
    """One row."""
    tokens = sum(map(len, made.answers))
    row = {
        "model": subject.name,
        "prompts": kind,
        "streams": streams,
        "way": {"none": "plain", "skip": f"skip {arguments.skip}", "draft": f"draft -{arguments.skip}"}.get(way, way),
        "guesses": arguments.guesses if way != "none" else 0,
        "kept_share": f"{made.kept / made.guessed:.3f}" if made.guessed else "",
        "tokens_per_step": f"{tokens / made.steps:.2f}",
        "tokens_per_second": f"{tokens / made.seconds:.4g}",
        "ratio": f"{plain.seconds / made.seconds:.2f}",
        "processor_ratio": f"{plain.processor_seconds / made.processor_seconds:.2f}",
        "requests": len(made.answers),
        "agreeing": sum(a == b for a, b in zip(made.answers, plain.answers, strict=True)),
        "threads": torch.get_num_threads(),
        "forced_keep": "" if subject.keep is None else subject.keep,
    }
    print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    append_row("serve_speculation", row, folder=arguments.results, commit=arguments.commit)


def main() -> None:
    """SmolLM2, or a shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", help="a preset with random weights instead of SmolLM2's own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--keep", type=float, default=0.8, help="with --shape: the share of guesses left alone")
    parser.add_argument("--skip", type=int, default=10, help="layers left out of the draft and when skipping")
    parser.add_argument("--guesses", type=int, default=4)
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--prompts", type=int, default=4, help="of each kind, for one stream")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--kind", choices=("repeating", "open"), help="of SmolLM2's prompts; both where not given")
    parser.add_argument("--threads", type=int, help="as torch has them by default")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if arguments.shape is None:
        return measure(real_subject(arguments.skip), arguments)
    measure(random_subject(arguments.shape, arguments.device, arguments.skip, arguments.keep), arguments)


if __name__ == "__main__":
    main()
