"""Bits by layer chosen by `--fit`, coded by GPTQ, beside GPTQ with one width for all in the same bytes.

`tightfit compress --fit` chooses bits by what rounding to nearest loses, and GPTQ then codes them. Here both are coded,
the mix that is chosen within the bytes of one width for all, and that width, and measured on other text. Widths between
the whole ones are those with half the group: 3 bits in groups of 32 take the bytes of 3.75 bits.
Appends to benchmarks/results/fit_gptq.csv; of SmolLM2-135M-Instruct a row takes some minutes on two CPU cores.

    python -m benchmarks.fit_gptq --calibrate wiki.train.txt --test wiki.test.txt --missing
"""

import argparse
import csv
import tempfile
from pathlib import Path
from time import monotonic

import torch

from benchmarks.compress_bench import Windows
from benchmarks.fit_quality import add_arguments, measure, read_rows
from benchmarks.rows import append_row
from tightfit.compress.compression import CompressionJob, compress
from tightfit.compress.fit.bit_choice import BitChoice, group_of, plain_bytes, recipe_for, uniform_bytes, units
from tightfit.compress.fit.fitting import best_mix
from tightfit.compress.model_parts import ModelParts
from tightfit.models.loading import load_model, load_source_tokenizer
from tightfit.models.quantized.matrices import matrices
from tightfit.models.spec import ModelSpec
from tightfit.train.data.dataset import PackedText
from tightfit.train.data.shards import prepare_text

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


class Coder:
    """Codes choices of one model by GPTQ and measures what they lose."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.original = load_model(arguments.model, device=arguments.device, packed=False).model
        self.spec = self.original.spec
        store = prepare_text(
            [arguments.test],
            load_source_tokenizer(arguments.model),
            cache_dir=arguments.cache,
            vocab_size=self.spec.vocab_size,
        )
        text = PackedText(store, arguments.length)
        self.windows = Windows(self.original, text, arguments.windows * arguments.length)

    def measure(self, name: str, choice: BitChoice, group: int) -> None:
        """Append a row."""
        arguments, began = self.arguments, monotonic()
        with tempfile.TemporaryDirectory() as folder:
            job = CompressionJob(
                model=arguments.model,
                out=Path(folder) / "small",
                recipe=recipe_for(self.spec, choice, group, "gptq"),
                data=(arguments.calibrate,),
                samples=arguments.samples,
                length=arguments.length,
                device=arguments.device,
                cache=arguments.cache,
            )
            report = compress(job, lambda cost: None, lambda done, total, layer: None)
            seconds = monotonic() - began
            made = load_model(str(job.out), device=arguments.device, packed=False).model
        found = self.windows.compare(made, self.original)
        coded = sum(count * outputs * inputs for count, outputs, inputs in matrices(self.spec).values())
        row = {
            "model": arguments.model,
            "mix": name,
            "group": group,
            "bits_per_weight": round(8 * (choice.bytes - plain_bytes(self.spec)) / coded, 3),
            "bytes": choice.bytes,
            "predicted_kl": "" if choice.loss != choice.loss else round(choice.loss, 5),
            "calibration_kl": round(report.measured.kl or 0.0, 5),
            "measured_kl": round(found.kl.mean, 5),
            "kl_half_width": round(found.kl.half_width or 0.0, 5),
            "perplexity": round(found.perplexity, 3),
            "original_perplexity": round(found.original_perplexity, 3),
            "calibration": f"{arguments.samples} x {arguments.length}",
            "test": f"{found.rows} x {arguments.length}",
            "seconds": round(seconds, 1),
        }
        append_row(TABLE, row, folder=arguments.results, commit=arguments.commit)
        print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser)
    parser.add_argument("--samples", type=int, default=16, help="calibration rows of GPTQ")
    arguments = parser.parse_args()
    parts = ModelParts(arguments.model, torch.device(arguments.device))
    spec, group = parts.spec, group_of(parts.spec)
    rows = read_rows(arguments, arguments.calibrate, arguments.rows)
    found = measure(arguments, parts, group)
    done = done_already(arguments.results / f"{TABLE}.csv") if arguments.missing else set()
    coder = Coder(arguments)
    for bits, share in UNIFORM:
        same = uniform(spec, bits, group // share)
        name = f"{bits} bits in groups of {group // share}"
        if f"uniform {name}" not in done:
            coder.measure(f"uniform {name}", same, group // share)
        if f"chosen as {name}" not in done:
            chosen = best_mix(parts, rows, found, group, same.bytes)
            coder.measure(f"chosen as {name}", chosen, group)


if __name__ == "__main__":
    main()
