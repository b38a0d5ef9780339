"""Tokens per second of a training step of a Hugging Face model: as it is, with Liger, with ours; and of our decoder.

The workload, the loop and the checks are train_step.py's. Liger is optional (`pip install liger-kernel`) and last:
it replaces a global of transformers' modeling file. Writes benchmarks/results/hf_step.csv.

    python -m benchmarks.hf_step --case h200-1b --case h200-8b
"""

import argparse
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.rows import RESULTS
from benchmarks.train_step import CASES, Maker, make_ours, make_theirs, run_case
from tightfit.hf import accelerate


def with_liger(model: Any) -> Any:
    """The same model with Liger's kernels, the fused loss among them."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)
    return model


MAKERS: dict[str, Maker] = {
    "huggingface": make_theirs,
    "huggingface+tightfit": partial(make_theirs, prepare=accelerate),
    "tightfit": make_ours,
    "huggingface+liger": partial(make_theirs, prepare=with_liger),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=CASES, action="append", required=True)
    parser.add_argument("--only", choices=MAKERS, action="append", help="these implementations alone")
    parser.add_argument("--steps", type=int, help="timed steps of each, in place of the case's")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    makers = {name: maker for name, maker in MAKERS.items() if name in (arguments.only or MAKERS)}
    if not find_spec("liger_kernel"):
        makers.pop("huggingface+liger", None)
    for chosen in arguments.case:
        run_case(chosen, arguments.results, arguments.commit, makers, rounds=1, table="hf_step", steps=arguments.steps)
