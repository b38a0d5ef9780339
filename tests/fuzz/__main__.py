"""`python -m tests.fuzz --cases 10000 --jobs 8`: inputs that are wrong, of every kind, in bounded time and memory.

A finding names its number; `--only NUMBER` runs that case alone, in this process, for a debugger to see. `--first`
goes on where an earlier call ended, and `--minutes` stops it between two cases; the last line says how many were run.
"""

import argparse
import math
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from tests.fuzz import data_files, model_files, run_files, words
from tests.fuzz.containment import Make
from tests.fuzz.lanes import run_cases
from tests.fuzz.materials import Materials

KINDS: dict[str, Make] = {**words.KINDS, **data_files.KINDS, **model_files.KINDS, **run_files.KINDS}


def main() -> int:
    """Print what was found; the exit code says whether anything was."""
    asked = _arguments()
    torch.set_num_threads(1)  # a case is small, and there may be one for every core
    kinds = KINDS if asked.kind is None else {asked.kind: KINDS[asked.kind]}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        given = Materials(Path(folder))
        if asked.only is not None:
            make = kinds[list(kinds)[asked.only % len(kinds)]]
            made = make(random.Random(f"{asked.seed} {asked.only}"), given, Path(tempfile.mkdtemp(dir=folder)))
            print(made())
            return 0
        given.make_all()
        return _run(asked, kinds, given)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes beside each other")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after so long")
    parser.add_argument("--kind", help="only this kind of input", choices=list(KINDS))
    parser.add_argument("--only", type=int, help="only the case of this number, without containment")
    return parser.parse_args()


def _run(asked: argparse.Namespace, kinds: dict[str, Make], given: Materials) -> int:
    began = time.monotonic()
    found, done = Counter[str](), 0
    numbers = range(asked.first, asked.first + asked.cases)
    deadline = began + 60 * asked.minutes
    for outcome in run_cases(kinds, numbers, asked.seed, given, jobs=asked.jobs, deadline=deadline):
        done += 1
        if outcome.what:
            found[outcome.kind] += 1
            print(f"case {outcome.number} ({outcome.kind}) {outcome.what}", flush=True)
    for kind, count in found.most_common():
        print(f"  {count:5} {kind}")
    print(
        f"{done} of {asked.cases} cases (seed {asked.seed}) of {len(kinds)} kinds in {time.monotonic() - began:.0f} s: "
        f"{sum(found.values())} findings"
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
