"""What every row of the table of compression quality starts from: the model, its calibration rows, its test windows.

Two ways to calibrate. `sequential`, as `tightfit compress` does it: every set of layers sees inputs that came through
the layers already coded. `shared`: the original's inputs, observed once and kept for all rows, ours and others', which
costs one pass for the whole table and gives every method somewhat less.
"""

import argparse
import hashlib
import os
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.compress_entries import GGUF_FEEDBACK, Entry
from benchmarks.compress_peers import BLOCKS, PEERS
from benchmarks.compress_pipelines import PIPELINES
from tightfit.compress.calibration.calibration import Calibration, read_calibration
from tightfit.compress.calibration.inputs import InputStatistics
from tightfit.compress.calibration.observation import observe, run_layer
from tightfit.compress.comparison import Comparison, compare_models, hidden_states
from tightfit.compress.gguf.gguf_feedback import code_layer
from tightfit.compress.layer_compression import code_weight, compress_layer
from tightfit.compress.linear_sets import linear_sets
from tightfit.compress.rounding.rotation import Rotation, rotated_spec
from tightfit.models.decoder import Decoder
from tightfit.models.loading import load_model
from tightfit.models.quantized.linear import quantize_linear
from tightfit.models.quantized.matrices import matrices
from tightfit.train.data.dataset import PackedText
from tightfit.train.data.loader import evaluation_batches
from tightfit.train.data.shards import prepare_text

BATCH_TOKENS = 8192
CALIBRATION_LENGTH = 512
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


@torch.no_grad()
def observed(model: Decoder, calibration: Calibration) -> Moments:
    """Statistics of the inputs of every matrix of the unchanged model."""
    found: Moments = {}
    stream = calibration.embedded(model)
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
    stream = calibration.embedded(model) if entry.recipe.is_calibrated else []
    unchanged = stream if entry.recipe.learns else []
    for index in range(model.spec.layers):
        result = compress_layer(model, index, entry.recipe, stream, code=coder, original=unchanged)
        stream, unchanged = result.outputs, result.original
    return model


@torch.no_grad()
def coded_as_gguf(original: Decoder, entry: Entry, calibration: Calibration) -> Decoder:
    """A copy of the model with the blocks that our export writes, layer after layer."""
    model, stream = deepcopy(original), calibration.embedded(original)
    for index in range(model.spec.layers):
        _, stream = code_layer(
            model, index, stream, lambda name, shape: entry.kind(name.removesuffix(".weight"), model.spec)
        )
    return model


class Windows:
    """The first `tokens` tokens of the test text in windows of `length`, and the original's hidden states there."""

    def __init__(self, model: Decoder, text: PackedText, tokens: int) -> None:
        self.length = text.sequence_length
        self.subset = torch.utils.data.Subset(text, range(min(tokens // self.length, len(text))))
        self.states = hidden_states(model, self.batches())

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """All windows, about 8192 tokens at a time."""
        return iter(evaluation_batches(self.subset, max(BATCH_TOKENS // self.length, 1)))

    def compare(self, model: Decoder, original: Decoder) -> Comparison:
        """`model` beside the original."""
        return compare_models(model, original, self.batches(), self.states)


class Bench:
    """The model, its calibration rows, its test windows, and what of them is computed once."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        loaded = load_model(arguments.model, device=arguments.device)
        assert loaded.tokenizer is not None
        self.tokenizer = loaded.tokenizer
        self.model, spec = loaded.model, loaded.model.spec
        self.calibration = read_calibration(
            arguments.model,
            spec,
            [arguments.calibrate],
            samples=arguments.samples,
            length=CALIBRATION_LENGTH,
            cache=arguments.cache,
            field="text",
            progress=False,
        )
        store = prepare_text([arguments.test], loaded.tokenizer, cache_dir=arguments.cache, vocab_size=spec.vocab_size)
        texts = [PackedText(store, length) for length in arguments.length]
        self.windows = [Windows(self.model, text, arguments.tokens) for text in texts]
        self._moments: Moments | None = None

    @property
    def moments(self) -> Moments:
        """Of the original's inputs; kept in the cache folder between runs."""
        if self._moments is None:
            digest = hashlib.sha256(self.calibration.tokens.numpy().tobytes()).hexdigest()[:16]
            file = Path(self.arguments.cache).expanduser() / f"moments-{Path(self.arguments.model).name}-{digest}.pt"
            if not file.exists():
                part = file.with_suffix(f".{os.getpid()}")
                torch.save(observed(self.model, self.calibration), part)
                part.replace(file)
            self._moments = torch.load(file, weights_only=False, map_location=self.arguments.device)
        return self._moments

    def way(self, entry: Entry) -> str:
        """How the entry is calibrated: scales that move inside a layer, and static inputs, need the sequential way."""
        if entry.mixture is not None:
            return "sequential" if entry.name == GGUF_FEEDBACK else "shared"
        if (entry.package, entry.name) in PIPELINES:
            return "its own" if entry.recipe.is_calibrated else "no data"
        if not entry.recipe.is_calibrated:
            return "no data"
        moving = any(step.method in MOVING or step.static for step in entry.recipe.steps)
        return "sequential" if moving or entry.recipe.rotation is not None else str(self.arguments.way)

    def coded(self, entry: Entry) -> tuple[Decoder, float]:
        """A copy of the model coded by `entry`, and the seconds that took."""
        moments = self.moments if self.way(entry) == "shared" else {}
        began = time.monotonic()
        pipeline = PIPELINES.get((entry.package or "tightfit", entry.name))
        if pipeline is not None:
            model = pipeline(self.model, self.tokenizer, self.calibration.tokens, entry.recipe.steps[-1])
        elif entry.name == GGUF_FEEDBACK:
            model = coded_as_gguf(self.model, entry, self.calibration)
        elif entry.mixture is not None or moments:
            model = coded_with_shared_moments(self.model, entry, moments)
        else:
            model = coded_in_sequence(self.model, entry, self.calibration)
        if self.arguments.device == "cuda":
            torch.cuda.synchronize()
        return model, time.monotonic() - began
