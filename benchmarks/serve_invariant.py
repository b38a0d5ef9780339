"""What batch-invariant serving costs and what it buys: the same requests to engines with and without, in one run.

Cases: one stream, many requests of mixed lengths, a long prompt. Ratios are of the best times of a few rounds, of
seconds and (on a CPU) of processor seconds: the latter mean something on a busy machine too. Then every one of the many
requests is asked alone: how many of their greedy answers differ from those they got in company. Models: SmolLM2's own
weights from its GGUF file with texts of the standard library, or a shape with random bfloat16 numbers and random tokens
(`--shape`). Rows go to benchmarks/results/serve_invariant.csv.

    python -m benchmarks.serve_invariant
    python -m benchmarks.serve_invariant --shape smollm2-135m
    python -m benchmarks.serve_invariant --shape llama-3.2-1b --device cuda --requests 64 --prompt 4096
    python -m benchmarks.serve_invariant --shape tiny-llama --requests 4 --prompt 40
"""

import argparse
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch

from benchmarks.rows import RESULTS, append_row
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.loading import SMOLLM2, load_model
from tightfit.models.resolve import resolve_spec
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling

Shape = tuple[int, int]
"""Tokens of a prompt and of its answer."""
CACHE_BYTES = {"cpu": 2**28, "cuda": 2**34}


class Taken(NamedTuple):
    """Seconds of one run: by the clock, and of all threads' processor time."""

    wall: float
    processor: float


@dataclass
class Subject:
    """A model, and where its prompts come from."""

    name: str
    model: Decoder
    text: list[int]

    def requests(self, shapes: list[Shape], seed: int) -> list[Request]:
        """Pieces of the text, answered greedily."""
        chance = random.Random(seed)
        made = []
        for index, (prompt, answer) in enumerate(shapes):
            at = chance.randrange(len(self.text) - prompt)
            sampling = Sampling(max_tokens=answer, temperature=0)
            made.append(Request(id=str(index), prompt=self.text[at : at + prompt], sampling=sampling))
        return made


def real_subject(device: str) -> Subject:
    """SmolLM2 as its package brings it."""
    loaded = load_model(SMOLLM2, device=torch.device(device), dtype=torch.float32)
    assert loaded.tokenizer is not None
    return Subject(SMOLLM2, loaded.model, loaded.tokenizer.encode("\n".join(sorted(topics.values()))[:200_000]))


def random_subject(preset: str, device: str) -> Subject:
    """Random bfloat16 numbers, on a CPU held as float32, as a published checkpoint is read."""
    torch.manual_seed(0)
    spec = resolve_spec(preset)
    with torch.device(device):
        model = Decoder(spec)
    init_weights(model, gain=1.5)
    model = model.bfloat16() if device == "cuda" else model.bfloat16().float()
    chance = random.Random(0)
    return Subject(preset, model, [chance.randrange(spec.vocab_size) for _ in range(20_000)])


def run(engine: Engine, requests: list[Request]) -> tuple[Taken, list[list[int]]]:
    """All at once; how long it took, and the answers."""
    began, began_processor = time.perf_counter(), time.process_time()
    made = engine.generate(requests)
    if engine.runner.device.type == "cuda":
        torch.cuda.synchronize()
    taken = Taken(time.perf_counter() - began, time.process_time() - began_processor)
    return taken, [made[request.id][0].tokens for request in requests]


def best_of(engine: Engine, subject: Subject, shapes: list[Shape], rounds: int) -> Taken:
    """The least of each kind of seconds."""
    found = [run(engine, subject.requests(shapes, seed))[0] for seed in range(rounds)]
    return Taken(*(min(column) for column in zip(*found, strict=True)))


def differing(engine: Engine, requests: list[Request]) -> int:
    """How many answers are others than those of the same request alone."""
    together = run(engine, requests)[1]
    return sum(run(engine, [request])[1][0] != found for request, found in zip(requests, together, strict=True))


def measure(subject: Subject, arguments: argparse.Namespace) -> None:
    """A row for each case."""
    chance = random.Random(1)
    longest = min(arguments.prompt + 1, subject.model.spec.max_positions)
    config = EngineConfig(
        max_sequences=arguments.requests,
        max_length=max(longest, 256),
        prefix_cache=False,
        cache_bytes=CACHE_BYTES[arguments.device],
    )
    plain, invariant = (Engine(subject.model, None, replace(config, batch_invariant=on)) for on in (False, True))
    mixed = [(chance.randint(8, 96), chance.randint(8, 64)) for _ in range(arguments.requests)]
    cases: dict[str, list[Shape]] = {"one stream": [(32, 32)], f"{len(mixed)} requests": mixed}
    cases[f"a prompt of {longest - 1}"] = [(longest - 1, 1)]
    for case, shapes in cases.items():
        for engine in (plain, invariant):
            run(engine, subject.requests(shapes[:1], 99))  # what is made on first use is not timed
        without, with_it = (best_of(engine, subject, shapes, arguments.rounds) for engine in (plain, invariant))
        counted = len(shapes) > 1
        row = {
            "model": subject.name,
            "case": case,
            "ratio": f"{with_it.wall / without.wall:.2f}",
            "processor_ratio": f"{with_it.processor / without.processor:.2f}",
            "plain_ms": f"{1e3 * without.wall:.1f}",
            "invariant_ms": f"{1e3 * with_it.wall:.1f}",
            "rows_of_passes": " ".join(map(str, invariant.runner.tiles.sizes)),  # type: ignore[union-attr]
            "differing_plain": differing(plain, subject.requests(shapes, 0)) if counted else "",
            "differing_invariant": differing(invariant, subject.requests(shapes, 0)) if counted else "",
            "half_weights": plain.budget.half_bytes > 0,
            "threads": torch.get_num_threads(),
        }
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        append_row("serve_invariant", row, folder=arguments.results, commit=arguments.commit)


def main() -> None:
    """Both ways."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", help="a preset with random weights instead of SmolLM2's own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the long prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="as torch has them by default")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    device = arguments.device
    measure(random_subject(arguments.shape, device) if arguments.shape else real_subject(device), arguments)


if __name__ == "__main__":
    main()
