"""A model compressed by a recipe as `tightfit compress` does it, and what it loses on other text."""

import argparse
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.compress_bench import Windows
from benchmarks.rows import append_row
from tightfit.compress.compression import CompressionJob, compress
from tightfit.compress.recipe import Recipe
from tightfit.models.loading import load_model, load_source_tokenizer
from tightfit.train.data.dataset import PackedText
from tightfit.train.data.shards import prepare_text


class RecipeBench:
    """The original, its test windows, and the results that recipes are added to."""

    def __init__(self, arguments: argparse.Namespace, table: str) -> None:
        self.arguments, self.table = arguments, table
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

    def measure(self, recipe: Recipe, **about: Any) -> None:
        """Append a row that begins with `about`."""
        arguments, began = self.arguments, monotonic()
        with tempfile.TemporaryDirectory() as folder:
            job = CompressionJob(
                model=arguments.model,
                out=Path(folder) / "small",
                recipe=recipe,
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
        row = {
            "model": arguments.model,
            **about,
            "calibration_kl": round(report.measured.kl or 0.0, 5),
            "measured_kl": round(found.kl.mean, 5),
            "kl_half_width": round(found.kl.half_width or 0.0, 5),
            "perplexity": round(found.perplexity, 3),
            "original_perplexity": round(found.original_perplexity, 3),
            "calibration": f"{arguments.samples} x {arguments.length}",
            "test": f"{found.rows} x {arguments.length}",
            "seconds": round(seconds, 1),
        }
        append_row(self.table, row, folder=arguments.results, commit=arguments.commit)
        print(row, flush=True)
