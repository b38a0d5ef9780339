"""`--fit CARD --context N`: bits by layer so that weights, KV cache and activations fit a card, for the least loss.

    weights ≤ (card − CUDA context) / (1 + slack) − cache of N tokens − prefill − logits − one expanded matrix

by the ledger of serving (memory/formulas/serving.py); widths that no kernel reads packed are expanded one matrix at a
time, where layers that read the same input count as one matrix. Before the mix is taken, its loss is measured as a
whole, beside that of the best single width that fits, both coded by the final method: GPTQ gains more in some layers
than in others, which estimates for rounding to nearest cannot know. Sizes are those of the codes as a server holds
them, to the byte.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp

import torch
from torch import Tensor

from tightfit.compress.compression import PLAIN_DTYPE, CompressionJob
from tightfit.compress.fit.bit_choice import (
    LEAST_WIDTHS,
    WIDTHS,
    BitChoice,
    choose_bits,
    group_of,
    options_of,
    recipe_for,
    require_room,
    scheme_of,
    uniform_bytes,
    units,
)
from tightfit.compress.fit.kept_choice import KeptChoice
from tightfit.compress.fit.measuring_memory import measuring_ledger
from tightfit.compress.fit.rounded_streams import embedded, measured_losses
from tightfit.compress.fit.sensitivity import Sensitivities, measure_sensitivities
from tightfit.compress.layer_compression import compress_layer
from tightfit.compress.loss_probe import divergences
from tightfit.compress.memory import PROBED_LENGTH, PROBED_ROWS
from tightfit.compress.model_parts import ModelParts
from tightfit.compress.recipe import Recipe
from tightfit.durable import require_new
from tightfit.errors import UserError
from tightfit.hardware.machine import Machine
from tightfit.memory.formulas.serving import serving_ledger
from tightfit.memory.ledger import Ledger
from tightfit.models.loading import digest_of, source_spec
from tightfit.models.quantized.held_weights import expanded_bytes
from tightfit.models.spec import ModelSpec

FITTED_METHODS = ("gptq", "rtn")
MIXING_FORMATS = ("compressed-tensors", "tightfit")
"""Layouts that hold several widths."""


@dataclass(frozen=True)
class Fit:
    """What was chosen, what it is expected to cost in quality, and what the card will hold."""

    choice: BitChoice
    recipe: Recipe
    ledger: Ledger
    card_bytes: int
    length: int
    measuring: Ledger | None = None
    """Ledger of measuring sensitivities; None where an earlier run's choice is reused."""

    @property
    def perplexity_ratio(self) -> float:
        """Expected perplexity over the original's."""
        return exp(self.choice.loss)

    def describe(self, machine: Machine) -> str:
        """One line."""
        counts: dict[int, int] = {}
        for bits in self.choice.bits.values():
            counts[bits] = counts.get(bits, 0) + 1
        told = ", ".join(f"{count} at {bits}" for bits, count in sorted(counts.items(), reverse=True))
        copies = f"; each of the {machine.ranks} cards serves a copy" if machine.ranks > 1 else ""
        return (
            f"fits {machine.accelerator.name} with {self.length:,} tokens: {self.ledger.peak_bytes() / 2**30:.2f} of "
            f"{self.card_bytes / 2**30:.2f} GiB, weights {self.choice.bytes / 2**30:.3f} GiB; bits by set of layers: "
            f"{told}; expected perplexity {self.perplexity_ratio - 1:+.1%} (KL {self.choice.loss:.4f}){copies}"
        )


def weight_budget_bytes(spec: ModelSpec, card_bytes: int, length: int) -> int:
    """The most bytes that weights may take beside a request of `length` tokens."""
    if not 1 <= length <= spec.max_positions:
        raise UserError(f"--context is {length}, but the model has {spec.max_positions} positions; give 1 to that many")
    low, high = 0, card_bytes
    while low < high:  # bisection: the ledger grows with the weights, and its slack is a share of all its lines
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fit_ledger(spec, middle, length).peak_bytes() <= card_bytes else (low, middle - 1)
    return low


def fit_ledger(spec: ModelSpec, stored_bytes: int, length: int) -> Ledger:
    """The ledger of a card that serves weights of `stored_bytes` and one request of `length` tokens."""
    group = group_of(spec)
    expanded = max(expanded_bytes(spec, scheme_of(bits, group)) for bits in LEAST_WIDTHS)
    return serving_ledger(spec, length=length, stored_bytes=stored_bytes, expanded_bytes=expanded)


def best_mix(
    parts: ModelParts, rows: list[Tensor], found: Sensitivities, group: int, budget: int, method: str = "rtn"
) -> BitChoice:
    """The mix of least expected loss within `budget` bytes, with its measured loss on `rows`.

    Or one width for all, where that fits and was measured to lose less. Both are coded by `method`.
    """
    spec = parts.spec
    choice = choose_bits(spec, options_of(spec, found.losses, group), budget)
    every = [
        BitChoice(dict.fromkeys(units(spec), bits), uniform_bytes(spec, bits, group), loss)
        for bits, loss in found.uniform.items()
    ]
    fitting = [each for each in every if each.bytes <= budget and each.bits != choice.bits]
    tried = [choice, *sorted(fitting, key=lambda each: each.loss)[:1]]
    if method == "gptq":
        recipes = [recipe_for(spec, each, group, method) for each in tried]
        tried = [
            replace(each, loss=coded_loss(parts, rows, recipe, found.reference))
            for each, recipe in zip(tried, recipes, strict=True)
        ]
    else:
        [loss] = measured_losses(parts, rows, [choice.bits], group, found.reference)
        tried[0] = replace(choice, loss=loss)
    return min(tried, key=lambda each: each.loss)


def coded_loss(parts: ModelParts, rows: Sequence[Tensor], recipe: Recipe, known: Sequence[Tensor]) -> float:
    """KL to the original (nats a token) of layers coded by `recipe` for these rows.

    `known` are the outputs of the original's last layer.
    """
    stream = embedded(parts, rows)
    for index in range(parts.spec.layers):
        stream = compress_layer(parts.layer(index), index, recipe, stream, PLAIN_DTYPE).outputs
    return divergences(parts.head(), known, [stream])[0]


def fit_bits(
    job: CompressionJob,
    machine: Machine,
    context: int | None,
    method: str,
    say: Callable[[str], None] = lambda text: None,
) -> Fit:
    """Choose bits for one card of `machine`: an earlier run's choice, or by sensitivities on some calibration rows."""
    require_new(job.out)
    spec = source_spec(job.model)
    length = min(4096, spec.max_positions) if context is None else context
    _refuse(job, spec, method)
    card_bytes = machine.accelerator.memory_bytes
    budget = weight_budget_bytes(spec, card_bytes, length)
    if budget >= 2 * spec.params():
        raise UserError(
            f"{job.model} fits {machine.accelerator.name} with {length:,} tokens in 16 bits already; there is nothing "
            "to compress (--method makes it smaller all the same)"
        )
    group = group_of(spec)
    require_room(uniform_bytes(spec, min(LEAST_WIDTHS), group), budget)
    calibration = job.read_calibration(spec)
    facts = {
        "weights": digest_of(job.model),
        "rows": calibration.fingerprint(),
        "budget": budget,
        "group": group,
        "method": method,
    }
    kept = KeptChoice(job.cache, spec, facts)
    choice, measuring = kept.read(), None
    if choice is None:
        rows = [row[None, :PROBED_LENGTH].to(job.device) for row in calibration.tokens[:PROBED_ROWS]]
        widths = WIDTHS if uniform_bytes(spec, min(WIDTHS), group) <= budget else LEAST_WIDTHS
        measuring = measuring_ledger(spec, len(rows), rows[0].shape[1], len(widths))
        say(describe_measuring(measuring))
        parts = ModelParts(job.model, torch.device(job.device))
        found = measure_sensitivities(parts, rows, group, widths=widths, say=say)
        choice = best_mix(parts, rows, found, group, budget, method)
        kept.write(choice)
    else:
        say(f"bits were chosen by an earlier run: {kept.file}")
    recipe = recipe_for(spec, choice, group, method)
    return Fit(choice, recipe, fit_ledger(spec, choice.bytes, length), card_bytes, length, measuring)


def describe_measuring(ledger: Ledger) -> str:
    """One line to print before sensitivities are measured."""
    return (
        "bits are chosen by how sensitive layers are, measured in float32 with one in memory at a time, about "
        f"{ledger.peak_allocated_bytes() / 2**30:.2f} GiB"
    )


def _refuse(job: CompressionJob, spec: ModelSpec, method: str) -> None:
    """Refuse methods, formats and models that `--fit` cannot choose bits for."""
    if method not in FITTED_METHODS:
        raise UserError(f"--fit chooses bits for {' and '.join(FITTED_METHODS)}, not for --method {method}")
    if job.format is not None and job.format not in MIXING_FORMATS:
        raise UserError(
            f"--fit mixes widths, which {job.format} cannot hold; use --format {MIXING_FORMATS[0]}, or none"
        )
    if spec.experts is not None:
        raise UserError("--fit does not know how sensitive experts are; say their bits in a --recipe")
