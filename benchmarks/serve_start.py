"""What a start of the serving engine takes, by phase: on a machine's first start, and on the next.

Every start is a process of its own. The first of a model has an empty cache of compiled kernels, the second finds what
the first left. As in `tightfit serve`, kernels are compiled by processes that begin with this one, so that their
imports fall into ours. Weights are random and made on the device, which takes the place of reading them; `start` is
what comes after: the engine, until it would listen. Rows go to benchmarks/results/serve_start.csv.

    python -m benchmarks.serve_start                      1B, 8B, 8B in 4 and in 8 bits on a GPU, twice each: under 90 s
    python -m benchmarks.serve_start --here               kernels compiled in the engine's own process
    python -m benchmarks.serve_start --tiny --device cpu  the same code on a tiny model
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

from tightfit.serve.graphs.compiler import Compiler, start_compiler

CASES = {
    "1b": ("1b", None, None),
    "8b": ("8b", None, None),
    "8b-int4": ("8b", 4, None),
    "8b-w8a8": ("8b", None, "both"),
    "tiny": ("tiny", None, None),
}
"""Model, bits of integer weights, and what is in 8-bit floats."""
PHASES = ("imports", "weights", "cache", "hash", "trials", "compile", "load", "capture", "start", "first_token")


class Watch:
    """Seconds spent in functions, by name, and how long the lists were that they returned."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.listed: dict[str, int] = {}

    def around(self, owner: Any, name: str) -> None:
        """Time all calls of `owner.name` from now on."""
        function: Callable[..., Any] = getattr(owner, name)

        @wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            made = function(*arguments, **named)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
            self.listed[name] = self.listed.get(name, 0) + (len(made) if isinstance(made, list) else 0)
            return made

        setattr(owner, name, timed)

    def __getitem__(self, name: str) -> float:
        return self.seconds.get(name, 0.0)


def start_once(case: str, device: str, *, here: bool) -> dict[str, float]:
    """Seconds of each phase in this process, and how many kernels had to be compiled."""
    began = time.perf_counter()
    compiler = None if here else start_compiler(device)
    from benchmarks import serve_speed
    from tightfit.serve import assembly
    from tightfit.serve.engine import Engine
    from tightfit.serve.graphs import steps, warm_up

    watch, (name, bits, fp8) = Watch(), CASES[case]
    for owner, function in (
        (assembly, "capture"),
        (steps, "compile_kernels"),
        (warm_up, "missing_variants"),
        (Compiler, "wait_until_hashed"),
        (Compiler, "finish"),
    ):
        watch.around(owner, function)
    imported = time.perf_counter()
    options = argparse.Namespace(device=device, tiny=name == "tiny", fp8=fp8, bits=bits, no_overlap=False)
    bench = serve_speed.Bench(name, options)
    bench.wait()
    made = time.perf_counter()
    with compiler or nullcontext():
        bench.engine = Engine(bench.model, None, bench.config, compiler=compiler)
    bench.wait()
    started = time.perf_counter()
    bench.seconds([(bench.load.stream[0], 1)])
    return {
        "imports": imported - began,
        "weights": made - imported,
        "cache": started - made - watch["capture"],
        "hash": watch["wait_until_hashed"],
        "trials": watch["missing_variants"],
        "compile": watch["finish"],
        "load": watch["compile_kernels"]
        - sum(map(watch.__getitem__, ("wait_until_hashed", "missing_variants", "finish"))),
        "capture": watch["capture"] - watch["compile_kernels"],
        "start": started - made,
        "first_token": time.perf_counter() - started,
        "compiled": watch.listed.get("missing_variants", 0),
    }


def start_apart(case: str, arguments: argparse.Namespace, cache: str) -> dict[str, float]:
    """The same in a process of its own with `cache` for compiled kernels."""
    command = [sys.executable, "-m", "benchmarks.serve_start", "--once", "--case", case, "--device", arguments.device]
    command += ["--here"] if arguments.here else []
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    made = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(made.stdout.splitlines()[-1])
    return found


def measure(case: str, arguments: argparse.Namespace) -> None:
    """A first start and the next, a row each."""
    from benchmarks.rows import append_row

    with tempfile.TemporaryDirectory() as cache:
        for kind in ("first", "next"):
            found = start_apart(case, arguments, cache)
            told = "  ".join(f"{phase} {found[phase]:.2f}" for phase in PHASES)
            print(f"{case:8} {kind:5} {told}  compiled {found['compiled']:.0f}", flush=True)
            row = {"model": case, "kind": kind, "processes": not arguments.here, "compiled": int(found["compiled"])}
            row |= {f"{phase}_s": f"{found[phase]:.3f}" for phase in PHASES}
            append_row("serve_start", row, folder=arguments.results, commit=arguments.commit)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: a check that the script runs")
    parser.add_argument("--here", action="store_true", help="no other processes compile")
    parser.add_argument("--once", action="store_true", help="one start in this process, told as JSON")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    cases = arguments.case or (["tiny"] if arguments.tiny else ["1b", "8b", "8b-int4", "8b-w8a8"])
    if arguments.once:
        print(json.dumps(start_once(cases[0], arguments.device, here=arguments.here)))
        return
    for case in cases:
        measure(case, arguments)


if __name__ == "__main__":
    main()
