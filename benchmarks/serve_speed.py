"""Speed of the serving engine on random weights of Llama shapes: start, first token, one stream, batches, prefill.

The workloads are those of a vLLM script that runs beside it: greedy, lengths fixed, no prefix cache, 8192 positions.
Every case is guarded, so that one failure does not lose the others. Rows go to benchmarks/results/serve_speed.csv.

    python -m benchmarks.serve_speed                      1B and 8B on a GPU, under four minutes
    python -m benchmarks.serve_speed --model 1b --profile what the kernels of a step take
    python -m benchmarks.serve_speed --tiny --device cpu  the same code on tiny shapes
"""

import argparse
import gc
import random
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.rows import RESULTS, append_row
from tightfit.kernels.fp8.fp8_quantize import quantize_rows
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.directory import replace_module
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.quantized.scheme import Scheme
from tightfit.models.resolve import resolve_spec
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.graphs.compiler import Compiler, start_compiler
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling

MODELS = {"1b": "llama-3.2-1b", "8b": "llama-3.1-8b", "tiny": "tiny-llama"}
CONFIG = EngineConfig(max_sequences=256, step_tokens=16_384, max_length=8192, prefix_cache=False)
TINY = EngineConfig(max_sequences=8, step_tokens=64, max_length=128, prefix_cache=False, cache_bytes=2**22)


@dataclass(frozen=True)
class Load:
    """Lengths of prompts and answers of the cases."""

    stream: tuple[int, int] = (256, 512)
    batch: tuple[int, int, int] = (64, 256, 256)
    mixed: int = 256
    mixed_prompt: tuple[int, int] = (32, 1024)
    mixed_answer: tuple[int, int] = (32, 512)
    prefill: tuple[int, int] = (16, 4096)
    repeats: int = 3


BOTH = "both"
"""Weights and their inputs are rounded to 8-bit floats."""

TINY_LOAD = Load((8, 12), (4, 8, 8), 8, (4, 20), (2, 10), (2, 40), 1)


def quantize_fp8(model: Decoder, *, rounds_inputs: bool) -> None:
    """8-bit floats with a scale a row for every projection of the layers; embedding and head stay."""
    scheme = Scheme(kind="fp8", bits=8, group=0, activations="fp8" if rounds_inputs else None)
    for name, linear in list(model.layers.named_modules()):
        if isinstance(linear, torch.nn.Linear):
            codes, scale = quantize_rows(linear.weight.detach())
            coded = CodedWeight(scheme=scheme, codes=codes, scale=scale)
            replace_module(model, f"layers.{name}.weight", QuantizedLinear(coded))


def quantize(model: Decoder, bits: int, head: int | None) -> None:
    """Random codes in groups of 128 for every projection of the layers, and of `head` bits for the output's; the
    embedding stays."""
    for name, linear in list(model.layers.named_modules()):
        if isinstance(linear, torch.nn.Linear):
            replace_module(model, f"layers.{name}.weight", random_codes(linear, bits))
    if head is not None:
        replace_module(model, "head.weight", random_codes(model.head, head))


def random_codes(linear: torch.nn.Linear, bits: int) -> QuantizedLinear:
    """A quantized layer of the shape of `linear`."""
    (outputs, inputs), device = linear.weight.shape, linear.weight.device
    scheme = Scheme(bits=bits, group=128 if inputs % 128 == 0 else 16, symmetric=False)
    groups = inputs // scheme.group
    codes = torch.randint(0, 2**bits, (outputs, inputs), device=device, dtype=torch.uint8)
    scale = (0.02 * 2.0**-bits * torch.rand(outputs, groups, device=device)).half().float()
    zero = torch.full((outputs, groups), float(scheme.middle), device=device)
    return QuantizedLinear(CodedWeight(scheme=scheme, codes=codes, scale=scale, zero=zero))


class Bench:
    """One model on one device, and where its rows go."""

    def __init__(self, name: str, arguments: argparse.Namespace, compiler: Compiler | None = None) -> None:
        self.name, self.arguments, self.compiler = name, arguments, compiler
        self.device = torch.device(arguments.device)
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.load = TINY_LOAD if arguments.tiny else Load()
        self.config = replace(TINY if arguments.tiny else CONFIG, overlap=not arguments.no_overlap)
        self.random = random.Random(1234)
        self.model = self._make_model()
        self.engine: Engine | None = None

    def _make_model(self) -> Decoder:
        torch.manual_seed(0)
        with torch.device(self.device):
            model = Decoder(resolve_spec(MODELS.get(self.name, self.name))).to(self.dtype)
        init_weights(model)
        if self.arguments.fp8:
            quantize_fp8(model, rounds_inputs=self.arguments.fp8 == BOTH)
        if self.arguments.bits:
            quantize(model, self.arguments.bits, self.arguments.head)
        return model

    @property
    def weights(self) -> str:
        """What the layers' weights are."""
        if self.arguments.fp8:
            return "w8a8" if self.arguments.fp8 == BOTH else "fp8"
        if not self.arguments.bits:
            return str(self.dtype).removeprefix("torch.")
        return f"int{self.arguments.bits}" + (f"+head{self.arguments.head}" if self.arguments.head else "")

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def requests(self, shapes: list[tuple[int, int]]) -> list[Request]:
        """Random prompts, greedy answers of fixed lengths."""
        top = self.model.spec.vocab_size - 10
        return [
            Request(
                id=str(i),
                prompt=[self.random.randrange(10, top) for _ in range(prompt)],
                sampling=Sampling(max_tokens=answer, temperature=0),
            )
            for i, (prompt, answer) in enumerate(shapes)
        ]

    def seconds(self, shapes: list[tuple[int, int]], repeats: int = 1) -> float:
        """The best time for all of `shapes`."""
        assert self.engine is not None
        found = []
        for _ in range(repeats):
            requests = self.requests(shapes)
            self.wait()
            began = time.perf_counter()
            answers = self.engine.generate(requests)
            self.wait()
            found.append(time.perf_counter() - began)
            assert sum(len(each[0].tokens) for each in answers.values()) == sum(answer for _, answer in shapes)
        return min(found)

    def record(self, case: str, value: float, unit: str, seconds: float, note: str = "") -> None:
        """One row."""
        print(f"{self.name:5} {case:28} {value:12,.1f} {unit:10} {seconds * 1e3:12,.2f} ms  {note}", flush=True)
        row = {
            "model": self.name,
            "case": case,
            "value": f"{value:.4g}",
            "unit": unit,
            "seconds": f"{seconds:.5g}",
            "dtype": self.weights,
            "overlap": self.config.overlap,
            "note": note,
        }
        append_row("serve_speed", row, folder=self.arguments.results, commit=self.arguments.commit)


def start(bench: Bench) -> None:
    """Engine start: cache, buffers, graphs. Weights are there, and what compiles kernels began before them."""
    bench.wait()
    began = time.perf_counter()
    with bench.compiler or nullcontext():
        bench.engine = Engine(bench.model, None, bench.config, compiler=bench.compiler)
    bench.wait()
    seconds = time.perf_counter() - began
    print(bench.engine.describe())
    bench.record("start", seconds, "s", seconds)


def warm_up(bench: Bench) -> None:
    """First calls of kernels and libraries."""
    load = bench.load
    began = time.perf_counter()
    bench.seconds([(load.stream[0], 8)])
    bench.seconds([(load.batch[1], 8)] * load.batch[0])
    bench.seconds([(load.prefill[1], 1)] * load.prefill[0])
    bench.record("warm_up", time.perf_counter() - began, "s", time.perf_counter() - began)


def one_stream(bench: Bench) -> None:
    """First token, whole stream, decode alone."""
    prompt, answer = bench.load.stream
    first = bench.seconds([(prompt, 1)], 2 + bench.load.repeats)
    whole = bench.seconds([(prompt, answer)], bench.load.repeats)
    bench.record("first_token", first * 1e3, "ms", first, f"prompt {prompt}")
    bench.record("one_stream", answer / whole, "tok/s", whole, f"{prompt}+{answer}")
    bench.record("one_stream_decode", (answer - 1) / (whole - first), "tok/s", whole - first)


def batch(bench: Bench) -> None:
    """Many equal requests at once."""
    count, prompt, answer = bench.load.batch
    seconds = bench.seconds([(prompt, answer)] * count, 2)
    bench.record("batch", count * answer / seconds, "tok/s", seconds, f"{count}x({prompt}+{answer})")


def mixed(bench: Bench) -> None:
    """Many requests of mixed lengths."""
    chance = random.Random(7)
    shapes = [
        (chance.randint(*bench.load.mixed_prompt), chance.randint(*bench.load.mixed_answer))
        for _ in range(bench.load.mixed)
    ]
    tokens, note = sum(answer for _, answer in shapes), f"{len(shapes)} requests"
    first = bench.seconds(shapes)
    bench.record("mixed_first", tokens / first, "tok/s", first, f"{note}; libraries load kernels for new shapes")
    seconds = bench.seconds(shapes)
    bench.record("mixed", tokens / seconds, "tok/s", seconds, note)


def prefill(bench: Bench) -> None:
    """Long prompts, one token each."""
    count, prompt = bench.load.prefill
    seconds = bench.seconds([(prompt, 1)] * count, 2)
    bench.record("prefill", count * prompt / seconds, "tok/s", seconds, f"{count}x{prompt}")


def profile(bench: Bench) -> None:
    """What the kernels of decoding take, alone and in a batch."""
    loads = {
        "one stream": [(256, 33)],
        "batch of 64": [(256, 17)] * 64,
        "batch of 200": [(64, 33)] * 200,
        "prompt": [(256, 1)],
    }
    for label, shapes in loads.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            bench.seconds(shapes)
        print(label)
        print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=16, max_name_column_width=50))


CASES: list[Callable[[Bench], None]] = [start, warm_up, one_stream, batch, prefill, mixed]


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", action="append", help="1b, 8b or a preset")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: a check that the script runs")
    parser.add_argument("--bits", type=int, help="integer weights of so many bits in groups")
    parser.add_argument("--head", type=int, help="with --bits: integers of so many bits in the output projection too")
    parser.add_argument(
        "--fp8", nargs="?", const="weights", choices=("weights", BOTH), help="8-bit floats, a scale a row"
    )
    parser.add_argument("--no-overlap", action="store_true", help="kernels one after the other")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--case", action="append", choices=[case.__name__ for case in CASES[1:]], help="these alone")
    parser.add_argument("--budget", type=float, default=230.0, help="seconds after which no further case begins")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    began = time.perf_counter()
    for name in ["tiny"] if arguments.tiny else arguments.model or ["1b", "8b"]:
        bench = Bench(name, arguments, start_compiler(arguments.device))
        wanted = [case for case in CASES if arguments.case is None or case.__name__ in ("start", *arguments.case)]
        for case in [*wanted, *([profile] if arguments.profile else [])]:
            if time.perf_counter() - began > arguments.budget:
                print(f"{name:5} {case.__name__:28} passed over: the budget of {arguments.budget:g} s is spent")
                continue
            try:
                case(bench)
            except Exception:
                print(f"{name:5} {case.__name__:28} failed")
                traceback.print_exc()
        del bench
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
