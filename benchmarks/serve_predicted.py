"""What a serving step takes on this CPU as it is predicted, beside what it takes: first tokens, and tokens after them.

Parts of a step are measured first (tightfit/serve/cpu_timing.py), as `tightfit calibrate` and `tightfit bench serve`
do, by one thread. Then requests of several numbers and lengths run on SmolLM2's shape in float32, on its 4-bit GGUF
file, on the shape that `make run` trains, and on small models of families whose layers are not joined; steps are
measured in processor time, which means something on a busy machine too, and not the first of a shape, which finds its
memory. Rows go to benchmarks/results/serve_predicted.csv.

    OMP_NUM_THREADS=1 python -m benchmarks.serve_predicted
    OMP_NUM_THREADS=1 python -m benchmarks.serve_predicted --families
    OMP_NUM_THREADS=1 python -m benchmarks.serve_predicted --tiny
"""

import argparse
import os
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.rows import RESULTS, append_row
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.loading import SMOLLM2
from tightfit.models.presets import preset
from tightfit.models.spec import ModelSpec
from tightfit.plan.serving.cpu_seconds import CpuStepRates
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.load import engine_reads_as, measured_rates, predicted_seconds
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.start import start_engine

SHAPES = ((1, 64), (1, 256), (1, 1024), (8, 64), (16, 64), (8, 256))
"""Requests at a time, and tokens of their prompts."""
ANSWER = 12
FAMILIES = ("gpt2", "gemma2", "gemma3", "mixtral", "olmoe", "gpt-oss")
"""Whose layers run through their own modules."""
CONFIG = EngineConfig(max_sequences=16, max_length=1100, prefix_cache=False)


def random_engine(spec: ModelSpec) -> Engine:
    """Of a model of that shape."""
    torch.manual_seed(0)
    model = Decoder(spec)
    init_weights(model)
    return Engine(model, None, CONFIG)


def family_spec(family: str) -> ModelSpec:
    """All traits of a family in eight layers of 512."""
    tiny = preset(f"tiny-{family}")
    experts = None if tiny.experts is None else replace(tiny.experts, mlp_size=512)
    return replace(
        tiny,
        experts=experts,
        hidden_size=512,
        heads=8,
        kv_heads=8 * tiny.kv_heads // tiny.heads,
        head_dim=64,
        mlp_size=1536,
        layers=8,
        vocab_size=8192,
        max_positions=2048,
    )


def processor_seconds(engine: Engine, at_once: int, prompt: int, answer: int = ANSWER) -> tuple[float, float]:
    """Processor time of the step of all prompts, and of the median of the steps after it."""
    chance, top = random.Random(at_once + prompt), engine.model.spec.vocab_size
    for index in range(at_once):
        tokens = [chance.randrange(top) for _ in range(prompt)]
        sampling = Sampling(max_tokens=answer, temperature=0)
        engine.submit(Request(id=str(index), prompt=tokens, sampling=sampling))
    taken = []
    while engine.has_work:
        began = time.process_time()
        engine.step()
        taken.append(time.process_time() - began)
    return taken[0], statistics.median(taken[1:])


def run(model: str, weights: str, engine: Engine, rates: CpuStepRates, arguments: argparse.Namespace) -> None:
    """Every shape, a row each."""
    processor_seconds(engine, 1, 8)  # what is made on first use is not timed
    for at_once, prompt in SHAPES[: 2 if arguments.tiny else None]:
        if prompt + ANSWER > engine.max_length or at_once * prompt > engine.config.step_tokens:
            continue
        processor_seconds(engine, at_once, prompt, answer=2)
        first, between = processor_seconds(engine, at_once, prompt)
        predicted_first, predicted_between = predicted_seconds(engine, rates, at_once, prompt, ANSWER)
        row = {
            "model": model,
            "weights": weights,
            "at_once": at_once,
            "prompt_tokens": prompt,
            "first_token_ms": f"{1e3 * first:.1f}",
            "predicted_first_token_ms": f"{1e3 * predicted_first:.1f}",
            "between_tokens_ms": f"{1e3 * between:.2f}",
            "predicted_between_tokens_ms": f"{1e3 * predicted_between:.2f}",
            "threads": torch.get_num_threads(),
        }
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        append_row("serve_predicted", row, folder=arguments.results, commit=arguments.commit)


def main() -> None:
    """All models, with parts measured once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--families", action="store_true", help="only families whose layers are not joined")
    parser.add_argument("--tiny", action="store_true", help="the smallest model, and few requests")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # by torch.set_num_threads alone, long products have taken two
        raise SystemExit("OMP_NUM_THREADS is not 1; set it before Python starts, as parts are measured by one thread")
    torch.set_num_threads(1)
    small = random_engine(preset("nano-llama"))
    rates = measured_rates(small)
    assert isinstance(rates, CpuStepRates)
    if not arguments.families:
        run("nano-llama", "fp32", small, rates, arguments)
    if arguments.tiny:
        return
    for family in FAMILIES:
        run(f"{family}, 8 layers of 512", "fp32", random_engine(family_spec(family)), rates, arguments)
    if arguments.families:
        return
    run("smollm2-135m", "fp32", random_engine(preset("smollm2-135m")), rates, arguments)
    file = start_engine(SMOLLM2, CONFIG, device="cpu")[1]
    run("smollm2-135m", "4-bit GGUF", file, engine_reads_as(file, rates.measured), arguments)


if __name__ == "__main__":
    main()
