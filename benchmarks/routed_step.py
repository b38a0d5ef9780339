"""Seconds and memory of a training step of routed models: transformers' grouped products, with ours inside, and ours.

The workload, the loop and the checks are train_step.py's. The shapes are a few layers of Qwen3-MoE with 64 narrow
experts and of Mixtral with 8 wide ones. Liger's fused experts, where it is installed, run in a process of their own, as
it changes transformers' modules for good. Writes benchmarks/results/routed_step.csv.

    python -m benchmarks.routed_step --case h200-qwen3 --case h200-mixtral
    python -m benchmarks.routed_step --case h200-qwen3 --only tightfit
    python -m benchmarks.routed_step --case cpu-tiny
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


def few_layers(spec: ModelSpec, layers: int, experts: int) -> ModelSpec:
    """So many layers of a routed model, each with so many experts."""
    assert spec.experts is not None
    return replace(spec, layers=layers, experts=replace(spec.experts, count=experts))


def tiny(spec: ModelSpec) -> ModelSpec:
    """For a check on a CPU."""
    assert spec.experts is not None
    experts = replace(spec.experts, count=4, per_token=2, mlp_size=32)
    return replace(
        spec, layers=2, hidden_size=32, heads=4, kv_heads=2, head_dim=8, vocab_size=128, mlp_size=64, experts=experts
    )


ROUTED = {
    "h200-qwen3": Case(
        "qwen3-30b-a3b", 2, 4096, "cuda", torch.bfloat16, 10, False, partial(few_layers, layers=6, experts=64)
    ),
    "h200-mixtral": Case(
        "mixtral-8x7b", 2, 4096, "cuda", torch.bfloat16, 10, False, partial(few_layers, layers=4, experts=8)
    ),
    "cpu-tiny": Case("qwen3-30b-a3b", 2, 32, "cpu", torch.float32, 3, True, tiny),
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
    """With Liger's kernels, its fused experts among them."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

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
