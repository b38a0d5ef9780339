"""Mixes of bits, their predicted beside their measured loss, on real weights: 20 mixes of SmolLM2-135M-Instruct.

Sensitivities are measured on calibration text, as `tightfit compress --fit` does; then mixes are rounded to nearest and
measured on other text. Ten mixes are random; ten are chosen for budgets from 3.4 to 6.5 bits a weight. Every
width for all layers is measured too, beside the mix that is chosen for exactly its bytes.
Appends to benchmarks/results/fit_quality.csv and draws fit_quality.png beside it, where matplotlib is installed; what
measuring the sensitivities took goes to fit_seconds.csv.

    python -m benchmarks.fit_quality --calibrate wiki.train.txt --test wiki.test.txt
    python -m benchmarks.fit_quality --calibrate wiki.train.txt --only-time
"""

import argparse
import csv
import random
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import exp
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import torch
from torch import Tensor

from benchmarks.rows import RESULTS, append_row
from tightfit.compress.calibration.calibration import read_calibration
from tightfit.compress.comparison import log_probabilities
from tightfit.compress.fit.bit_choice import (
    PLAIN_BITS,
    WIDTHS,
    BitChoice,
    choose_bits,
    group_of,
    options_of,
    plain_bytes,
    unit_bytes,
    units,
)
from tightfit.compress.fit.rounded_streams import RoundedStreams, embedded
from tightfit.compress.fit.sensitivity import Sensitivities, measure_sensitivities
from tightfit.compress.model_parts import ModelParts
from tightfit.models.decoder import Decoder
from tightfit.models.loading import source_spec
from tightfit.models.quantized.matrices import matrices
from tightfit.models.spec import ModelSpec
from tightfit.report.figure import panels

BUDGET_BITS = (3.4, 3.6, 3.8, 4.0, 4.3, 4.6, 5.0, 5.4, 5.9, 6.5)
RANDOM_WIDTHS = (3, 4, 5, 6, 8)


def choice_of(spec: ModelSpec, found: Sensitivities, bits: Mapping[str, int], group: int) -> BitChoice:
    """A given mix, with its bytes and expected loss."""
    named = units(spec)
    held = plain_bytes(spec) + sum(unit_bytes(spec, named[unit], width, group) for unit, width in bits.items())
    loss = sum(found.losses[unit][width] for unit, width in bits.items() if width != PLAIN_BITS)
    return BitChoice(bits, held, loss)


def mixes(spec: ModelSpec, found: Sensitivities, group: int) -> dict[str, BitChoice]:
    """All that are measured, by name."""
    made: dict[str, BitChoice] = {}
    options, every = options_of(spec, found.losses, group), list(units(spec))
    quantized = sum(count * outputs * inputs for count, outputs, inputs in matrices(spec).values())
    for bits in BUDGET_BITS:
        made[f"chosen {bits}"] = choose_bits(spec, options, plain_bytes(spec) + int(quantized * bits / 8))
    chance = random.Random(0)
    for number in range(10):
        widths = chance.sample(RANDOM_WIDTHS, 3)
        made[f"random {number}"] = choice_of(spec, found, {unit: chance.choice(widths) for unit in every}, group)
    for bits in WIDTHS[:-1]:
        same = choice_of(spec, found, dict.fromkeys(every, bits), group)
        made[f"uniform {bits}"] = same
        made[f"chosen as uniform {bits}"] = choose_bits(spec, options, same.bytes)
    return made


@torch.no_grad()
def compared(
    head: Decoder, rows: Sequence[Tensor], known: Sequence[Tensor], made: Sequence[Tensor]
) -> tuple[float, float]:
    """Loss of what a mix made behind the last layer, and KL to what the original has there, a token."""
    total = kl = count = 0.0
    for tokens, original, x in zip(rows, known, made, strict=True):
        log_p, log_q = (log_probabilities(head, head.norm(states[:, :-1])) for states in (original, x))
        kl += float((log_p.exp() * (log_p - log_q)).sum())
        total -= float(log_q.gather(-1, tokens[:, 1:, None]).sum())
        count += tokens.shape[1] - 1
    return total / count, kl / count


def read_rows(arguments: argparse.Namespace, source: str, count: int) -> list[Tensor]:
    """So many windows of a text, [1, T] each."""
    found = read_calibration(
        arguments.model,
        source_spec(arguments.model),
        [source],
        samples=count,
        length=arguments.length,
        cache=arguments.cache,
        field="text",
        progress=False,
    )
    return [row[None].to(arguments.device) for row in found.tokens]


def measure(arguments: argparse.Namespace, parts: ModelParts, group: int) -> Sensitivities:
    """Sensitivities of all layers; what that took goes to fit_seconds.csv, processor time of all threads beside it."""
    rows = read_rows(arguments, arguments.calibrate, arguments.rows)
    began, began_cpu = monotonic(), process_time()
    found = measure_sensitivities(parts, rows, group, say=lambda text: print(text, flush=True))
    row = {
        "model": arguments.model,
        "calibration": f"{len(rows)} x {arguments.length}",
        "widths": " ".join(map(str, WIDTHS)),
        "threads": torch.get_num_threads(),
        "seconds": round(monotonic() - began, 1),
        "processor_seconds": round(process_time() - began_cpu, 1),
    }
    append_row("fit_seconds", row, folder=arguments.results, commit=arguments.commit)
    print(row, flush=True)
    return found


def measure_mixes(arguments: argparse.Namespace, parts: ModelParts, found: Sensitivities, group: int) -> None:
    """Append a row of every mix, and draw them."""
    spec, rows, path = parts.spec, read_rows(arguments, arguments.test, arguments.windows), arguments.results
    test = f"{len(rows)} x {arguments.length}"
    done = measured_already(path / "fit_quality.csv", test) if arguments.missing else set()
    named = {name: mix for name, mix in mixes(spec, found, group).items() if name not in done}
    plain = dict.fromkeys(units(spec), PLAIN_BITS)
    streams = RoundedStreams(embedded(parts, rows), [plain, *(mix.bits for mix in named.values())], group)
    for index in range(spec.layers):
        streams.follow(parts.layer(index), index)
    head, known = parts.head(), streams.streams[0]
    original, _ = compared(head, rows, known, known)
    quantized = sum(count * outputs * inputs for count, outputs, inputs in matrices(spec).values())
    made = []
    for (name, mix), stream in zip(named.items(), streams.streams[1:], strict=True):
        loss, kl = compared(head, rows, known, stream)
        row: dict[str, Any] = {
            "model": arguments.model,
            "mix": name,
            "bits_per_weight": round(8 * (mix.bytes - plain_bytes(spec)) / quantized, 3),
            "bytes": mix.bytes,
            "predicted_kl": round(mix.loss, 5),
            "measured_kl": round(kl, 5),
            "predicted_perplexity": round(exp(original + mix.loss), 3),
            "measured_perplexity": round(exp(loss), 3),
            "original_perplexity": round(exp(original), 3),
            "calibration": f"{arguments.rows} x {arguments.length}",
            "test": test,
        }
        made.append(row)
        append_row("fit_quality", row, folder=path, commit=arguments.commit)
        print(row, flush=True)
    if made and not done and find_spec("matplotlib") is not None:
        draw(made, path / "fit_quality.png")


def measured_already(path: Path, test: str) -> set[str]:
    """Mixes that the results have over the same test rows."""
    if not path.exists():
        return set()
    with path.open(encoding="utf-8", newline="") as file:
        return {row["mix"] for row in csv.DictReader(file) if row["test"] == test}


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Predicted against measured, and perplexity over size."""
    with panels(path, 1, 2, width=10, height=4.4) as (_, grid):
        left, right = grid[0]
        for kind, color, mark in (("chosen", "#1f5fa8", "o"), ("random", "#888888", "x"), ("uniform", "#d1495b", "s")):
            own = [row for row in rows if row["mix"].startswith(kind)]
            left.plot([r["measured_kl"] for r in own], [r["predicted_kl"] for r in own], mark, color=color, label=kind)
            own.sort(key=lambda row: float(row["bits_per_weight"]))
            line = "-" if kind != "random" else ""
            right.plot(
                [r["bits_per_weight"] for r in own],
                [r["measured_perplexity"] for r in own],
                mark + line,
                color=color,
                label=kind,
                markersize=4,
            )
        ends = [min(r["measured_kl"] for r in rows), max(r["measured_kl"] for r in rows)]
        left.plot(ends, ends, color="#111111", linewidth=0.8)
        left.set(
            xscale="log", yscale="log", xlabel="measured KL (nats a token)", ylabel="predicted", title="Mixes of bits"
        )
        right.set(
            yscale="log", xlabel="bits a quantized weight", ylabel="perplexity", title="The same bytes, spent otherwise"
        )
        for axes in (left, right):
            axes.legend(frameon=False)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this and fit_gptq.py are asked."""
    parser.add_argument("--calibrate", required=True)
    parser.add_argument("--test")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, default=8, help="calibration rows")
    parser.add_argument("--windows", type=int, default=8, help="test rows")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--missing", action="store_true", help="only mixes that the results do not have yet")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/tightfit"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser)
    parser.add_argument("--only-time", action="store_true", help="measure sensitivities and no mixes")
    arguments = parser.parse_args()
    if not (arguments.test or arguments.only_time):
        parser.error("say --test, or --only-time")
    parts = ModelParts(arguments.model, torch.device(arguments.device))
    group = group_of(parts.spec)
    found = measure(arguments, parts, group)
    if not arguments.only_time:
        measure_mixes(arguments, parts, found, group)


if __name__ == "__main__":
    main()
