"""Seconds and memory of a training step of routed models: transformers' grouped products, with ours inside, and ours.

The workload, the loop and the checks are train_step.py's. The shapes are a few layers of each routed family, Qwen3-MoE
with 64 of its experts. Liger's fused experts, where it is installed, run in a process of their own, as it changes
transformers' modules for good. Writes benchmarks/results/routed_step.csv.

    python -m benchmarks.routed_step --case h200-qwen3 --case h200-mixtral
    python -m benchmarks.routed_step --case h200-qwen3 --only tightfit
    python -m benchmarks.routed_step --case cpu-qwen3
"""

import argparse
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import RESULTS
from benchmarks.train_step import CASES, Case, Maker, make_ours, make_theirs, run_case
from tightfit.hf import accelerate
from tightfit.models.spec import ModelSpec


def few_layers(spec: ModelSpec, layers: int, experts: int | None = None) -> ModelSpec:
    """The first layers of a routed model, each with so many experts (None: all of them)."""
    assert spec.experts is not None
    routed = replace(spec.experts, count=experts or spec.experts.count)
    windows = tuple(layer for layer in spec.window_layers if layer < layers)
    return replace(spec, layers=layers, window_layers=windows, experts=routed)


def on_gpu(model: str, layers: int, experts: int | None = None) -> Case:
    """So many layers in bfloat16 on 2 x 4096 tokens."""
    return Case(model, 2, 4096, "cuda", torch.bfloat16, 10, False, partial(few_layers, layers=layers, experts=experts))


def on_cpu(model: str) -> Case:
    """For a check on a CPU."""
    return Case(model, 2, 32, "cpu", torch.float32, 3, True)


ROUTED = {
    "h200-qwen3": on_gpu("qwen3-30b-a3b", layers=6, experts=64),
    "h200-mixtral": on_gpu("mixtral-8x7b", layers=4),
    "h200-olmoe": on_gpu("olmoe-1b-7b", layers=6),
    "h200-deepseek-v2": on_gpu("deepseek-v2-lite", layers=6),
    "h200-gpt-oss": on_gpu("gpt-oss-20b", layers=4),
    "cpu-qwen3": on_cpu("tiny-qwen3-moe"),
    "cpu-mixtral": on_cpu("tiny-mixtral"),
    "cpu-olmoe": on_cpu("tiny-olmoe"),
    "cpu-deepseek-v2": on_cpu("tiny-deepseek-v2"),
    "cpu-gpt-oss": on_cpu("tiny-gpt-oss"),
}


def grouped(model: Any) -> Any:
    """With transformers' grouped products."""
    model.set_experts_implementation("grouped_mm")
    return model


MAKERS: dict[str, Maker] = {
    "huggingface grouped_mm": partial(make_theirs, prepare=grouped),
    "huggingface grouped_mm + tightfit": partial(make_theirs, prepare=lambda model: accelerate(grouped(model))),
    "tightfit": make_ours,
}
LIGER = "huggingface + liger"


def with_liger(model: Any) -> Any:
    """With Liger's kernels, its fused experts among them; where it knows the family, as it does nothing elsewhere."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise SystemExit(f"Liger has nothing for {model.config.model_type}")
    _apply_liger_kernel_to_instance(model=model)
    return model


def measure_liger(case: str, results: Path, commit: str | None) -> None:
    """In a process of its own."""
    command = [sys.executable, "-m", "benchmarks.routed_step", "--case", case, "--only", LIGER]
    command += ["--results", str(results), *(["--commit", commit] if commit else [])]
    subprocess.run(command, check=False)  # it may not fit or not run on this card: the others are told all the same


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=ROUTED, action="append", required=True)
    parser.add_argument("--only", choices=[*MAKERS, LIGER], help="this implementation alone, in this process")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    CASES.update(ROUTED)
    every = MAKERS | {LIGER: partial(make_theirs, prepare=with_liger)}
    makers = MAKERS if arguments.only is None else {arguments.only: every[arguments.only]}
    for chosen in arguments.case:
        run_case(chosen, arguments.results, arguments.commit, makers, rounds=1, table="routed_step")
        if arguments.only is None and find_spec("liger_kernel"):
            measure_liger(chosen, arguments.results, arguments.commit)
