"""Bits by layer chosen by `--fit`, coded by GPTQ, beside GPTQ with one width for all in the same bytes.

`tightfit compress --fit` chooses bits by what rounding to nearest loses, codes that mix and the best single width by
GPTQ, and takes the one that loses less on its calibration rows. Here what it takes within the bytes of one width for
all, and that width, are coded and measured on other text. Widths between the whole ones are those with half the group:
3 bits in groups of 32 take the bytes of 3.75 bits.
Appends to benchmarks/results/fit_gptq.csv; of SmolLM2-135M-Instruct a row takes some minutes on two CPU cores.

    python -m benchmarks.fit_gptq --calibrate wiki.train.txt --test wiki.test.txt --missing
"""

import argparse
import csv
from pathlib import Path

import torch

from benchmarks.fit_quality import add_arguments, measure, read_rows
from benchmarks.recipe_bench import RecipeBench
from tightfit.compress.fit.bit_choice import BitChoice, group_of, plain_bytes, recipe_for, uniform_bytes, units
from tightfit.compress.fit.fitting import best_mix
from tightfit.compress.model_parts import ModelParts
from tightfit.models.quantized.matrices import matrices
from tightfit.models.spec import ModelSpec

TABLE = "fit_gptq"
UNIFORM = ((4, 1), (3, 2), (5, 1), (4, 2), (3, 1))
"""Widths, and by how much the group is smaller than the usual one."""


def uniform(spec: ModelSpec, bits: int, group: int) -> BitChoice:
    """One width for all."""
    return BitChoice(dict.fromkeys(units(spec), bits), uniform_bytes(spec, bits, group), float("nan"))


def done_already(path: Path) -> set[str]:
    """Names of the rows that there are."""
    if not path.exists():
        return set()
    with path.open(encoding="utf-8", newline="") as file:
        return {row["mix"] for row in csv.DictReader(file)}


def measure_mix(bench: RecipeBench, name: str, choice: BitChoice, group: int) -> None:
    """Append the row of a choice of bits, coded by GPTQ."""
    spec = bench.spec
    coded = sum(count * outputs * inputs for count, outputs, inputs in matrices(spec).values())
    bench.measure(
        recipe_for(spec, choice, group, "gptq"),
        mix=name,
        group=group,
        bits_per_weight=round(8 * (choice.bytes - plain_bytes(spec)) / coded, 3),
        bytes=choice.bytes,
        predicted_kl="" if choice.loss != choice.loss else round(choice.loss, 5),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser)
    parser.add_argument("--samples", type=int, default=16, help="calibration rows of GPTQ")
    parser.add_argument("--bits", type=int, action="append", help="only widths of so many bits; repeatable")
    arguments = parser.parse_args()
    parts = ModelParts(arguments.model, torch.device(arguments.device))
    spec, group = parts.spec, group_of(parts.spec)
    rows = read_rows(arguments, arguments.calibrate, arguments.rows)
    found = measure(arguments, parts, group)
    done = done_already(arguments.results / f"{TABLE}.csv") if arguments.missing else set()
    bench = RecipeBench(arguments, TABLE)
    for bits, share in (each for each in UNIFORM if arguments.bits is None or each[0] in arguments.bits):
        same = uniform(spec, bits, group // share)
        name = f"{bits} bits in groups of {group // share}"
        if f"uniform {name}" not in done:
            measure_mix(bench, f"uniform {name}", same, group // share)
        if f"chosen as {name}" not in done:
            chosen = best_mix(parts, rows, found, group, same.bytes, "gptq")
            measure_mix(bench, f"chosen as {name}", chosen, group)


if __name__ == "__main__":
    main()
