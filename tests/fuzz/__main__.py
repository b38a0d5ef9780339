"""`python -m tests.fuzz --cases 10000 --seed 1`: inputs that are wrong, of every kind, in bounded time and memory.

A finding names its number; `--only NUMBER` runs that case alone, in this process, for a debugger to see.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz import data_files, model_files, run_files, words
from tests.fuzz.containment import Make, run_cases
from tests.fuzz.materials import Materials

KINDS: dict[str, Make] = {**words.KINDS, **data_files.KINDS, **model_files.KINDS, **run_files.KINDS}


def main() -> int:
    """Print what was found; the exit code says whether anything was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", help="only this kind of input", choices=list(KINDS))
    parser.add_argument("--only", type=int, help="only the case of this number, without containment")
    asked = parser.parse_args()
    kinds = KINDS if asked.kind is None else {asked.kind: KINDS[asked.kind]}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        given = Materials(Path(folder))
        if asked.only is not None:
            make = kinds[list(kinds)[asked.only % len(kinds)]]
            made = make(random.Random(f"{asked.seed} {asked.only}"), given, Path(tempfile.mkdtemp(dir=folder)))
            print(made())
            return 0
        given.make_all()
        began = time.monotonic()
        found = Counter[str]()
        for finding in run_cases(kinds, range(asked.cases), asked.seed, given):
            found[finding.kind] += 1
            print(f"case {finding.number} ({finding.kind}) {finding.what}", flush=True)
    print(
        f"{asked.cases} cases of {len(kinds)} kinds in {time.monotonic() - began:.0f} s: {sum(found.values())} findings"
    )
    for kind, count in found.most_common():
        print(f"  {count:5} {kind}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
