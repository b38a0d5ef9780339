"""What requests ask for, and what it costs: tokens/s of one stream and of 64, beside plain greedy requests.

Random weights of Llama shapes, in engines that have eight LoRA adapters of one rank on every projection of the layers.
Requests are greedy but for "sampled" (temperature 0.8, top-p 0.95): "plain"; "penalty", whose tokens the host counts
between two steps; "adapter", all the same one; "adapters", eight by turns, and every ninth request none. Rows go to
benchmarks/results/serve_requests.csv.

    python -m benchmarks.serve_requests                      1B and 8B on a GPU
    python -m benchmarks.serve_requests --tiny --device cpu  the same code on tiny shapes
"""

import argparse
import itertools
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.rows import RESULTS, append_row
from benchmarks.serve_speed import MODELS
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.adapter import Adapter, LowRank
from tightfit.models.initialisation import init_weights
from tightfit.models.resolve import resolve_spec
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling

ADAPTERS = 8
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=0)
PENALTY = Sampling(temperature=0, frequency_penalty=0.1)
GREEDY = Sampling(temperature=0)
KINDS: dict[str, tuple[Sampling, list[str | None]]] = {
    "plain": (GREEDY, [None]),
    "sampled": (SAMPLED, [None]),
    "penalty": (PENALTY, [None]),
    "adapter": (GREEDY, ["0"]),
    "adapters": (GREEDY, [*map(str, range(ADAPTERS)), None]),
}
CONFIG = EngineConfig(max_sequences=64, step_tokens=8192, max_length=1024, prefix_cache=False)
TINY = replace(CONFIG, max_sequences=4, step_tokens=64, max_length=64, cache_bytes=2**22)


def random_adapter(model: Decoder, rank: int, seed: int) -> Adapter:
    """On every projection of the layers."""
    made = torch.Generator(model.embed.weight.device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made, device=model.embed.weight.device).to(model.embed.weight) * 0.02

    shapes = {
        f"layers.{name}": linear.weight.shape
        for name, linear in model.layers.named_modules()
        if isinstance(linear, torch.nn.Linear)
    }
    changes = {name: LowRank(random(rank, inputs), random(outputs, rank)) for name, (outputs, inputs) in shapes.items()}
    return Adapter("random", rank, changes)


def requests(kind: str, streams: int, prompt: int, answer: int) -> list[Request]:
    """`streams` of them at once."""
    sampling, names = KINDS[kind]
    return [
        Request(
            id=str(index),
            prompt=[10 + (7 * index + place) % 200 for place in range(prompt)],
            sampling=replace(sampling, max_tokens=answer),
            adapter=name,
        )
        for index, name in zip(range(streams), itertools.cycle(names), strict=False)
    ]


@torch.no_grad()
def measure(name: str, arguments: argparse.Namespace) -> None:
    """Rows of one model."""
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = Decoder(resolve_spec(MODELS[name])).to(torch.bfloat16 if arguments.device == "cuda" else torch.float32)
    init_weights(model)
    adapters = {str(index): random_adapter(model, arguments.rank, index) for index in range(ADAPTERS)}
    began = time.perf_counter()
    engine = Engine(model, None, TINY if arguments.tiny else CONFIG, adapters=adapters)
    start = time.perf_counter() - began
    prompt, answer = (8, 8) if arguments.tiny else (256, 256)
    for streams in (1, 4 if arguments.tiny else 64):
        plain = None
        for kind in KINDS if streams > 1 else [kind for kind in KINDS if kind != "adapters"]:
            seconds = []
            for _ in range(arguments.repeats):
                began = time.perf_counter()
                made = engine.generate(requests(kind, streams, prompt, answer))
                seconds.append(time.perf_counter() - began)
                assert sum(len(each[0].tokens) for each in made.values()) == streams * answer
            speed = streams * answer / min(seconds)
            plain = plain or speed
            row = {
                "model": MODELS[name],
                "rank": arguments.rank,
                "adapters": ADAPTERS,
                "streams": streams,
                "requests": kind,
                "prompt": prompt,
                "answer": answer,
                "tokens_per_second": f"{speed:.4g}",
                "share_of_plain": f"{speed / plain:.3f}",
                "start_s": f"{start:.2f}",
                "dtype": str(model.embed.weight.dtype).removeprefix("torch."),
            }
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            append_row("serve_requests", row, folder=arguments.results, commit=arguments.commit)


def main() -> None:
    """All models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=("1b", "8b"), action="append")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: a check that the script runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    for name in ["tiny"] if arguments.tiny else arguments.model or ["1b", "8b"]:
        measure(name, arguments)


if __name__ == "__main__":
    main()
