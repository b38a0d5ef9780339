"""Serving: does a model fit one card at a quantization with a number of concurrent requests, and how fast at best.

Decoding is bound by memory bandwidth: every token reads all (active) weights and the request's keys and values once, so
one stream cannot be faster than bandwidth / bytes. Prefill is bound by matrix products (2 FLOPs per layer weight and
token, attention besides). Both are limits at the measured shares of the card's rates; predictions for our engine are
given beside them (seconds.py). With several cards, each serves a copy.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

from tightfit.errors import UserError
from tightfit.hardware.catalog import larger_cards
from tightfit.hardware.cpu_rates import CpuRates
from tightfit.hardware.efficiency import MEASURED, by_head_size
from tightfit.hardware.machine import Machine
from tightfit.hardware.sustained import generation_of
from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.jobs.served_weights import rounded_weights
from tightfit.memory.formulas.overheads import ON_CPU
from tightfit.memory.formulas.serving import CacheFormat, WeightFormat, seen_cache_bytes, serving_ledger, weight_bytes
from tightfit.memory.ledger import Ledger
from tightfit.models.quantized.held_weights import CodedHead, HeldWeights
from tightfit.models.quantized.scheme import Scheme
from tightfit.models.spec import ModelSpec
from tightfit.plan.notes import MEASURED_CARD
from tightfit.plan.serving.cpu_seconds import CpuStepRates
from tightfit.plan.serving.cpu_weights import HOST_SHARE, CpuFormat, CpuWeights, format_on_cpu, held_on_cpu
from tightfit.plan.serving.seconds import PackedProducts, ServingRates, StepRates
from tightfit.plan.serving.step import Step, layer_params

FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
SMALLER: tuple[WeightFormat, ...] = ("bf16", "q8_0", "q4_1", "q4_0")
PLAIN: tuple[WeightFormat, ...] = ("fp32", "fp16", "bf16")
CODED = {
    "int8": Scheme(bits=8, group=128, symmetric=False),
    "int4": Scheme(bits=4, group=128, symmetric=False),
    "fp8": Scheme(kind="fp8", bits=8, group=0),
    "w8a8": Scheme(kind="fp8", bits=8, group=0, activations="fp8"),
}
"""Formats of `tightfit compress` for a dense model's layers; embedding and head stay in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """One model on one card, `requests` at a time with `length` tokens each.

    Weights are in `form` or, if `compressed`, in the format of their files.
    """

    model: str
    spec: ModelSpec
    machine: Machine
    form: WeightFormat
    length: int
    requests: int
    cache: CacheFormat = "model"
    compressed: HeldWeights | None = None

    @property
    def ledger(self) -> Ledger:
        """The predicted ledger of the card; on a CPU, weights are in float32, or codes if an engine multiplies by
        them, with 16-bit copies."""
        ledger_of = partial(serving_ledger, self.spec, requests=self.requests, length=self.length, cache=self.cache)
        if self.machine.is_cpu:
            on_cpu = self._weights_on_cpu
            return ledger_of(
                form=self.form if on_cpu.layers_as == "int4" else "fp32",
                overheads=ON_CPU,
                stored_bytes=on_cpu.held_bytes,
                copied_bytes=on_cpu.copied_bytes,
                element_bytes=FLOAT32_BYTES,
            )
        if (small := self.compressed) is None:
            return ledger_of(form=self.form)
        expanded_bytes = max(small.expanded_bytes, self._head_expanded_bytes)
        return ledger_of(form=self.form, stored_bytes=small.total_bytes, expanded_bytes=expanded_bytes)

    @property
    def weights_name(self) -> str:
        """The name of the weights' format."""
        return self.form if self.compressed is None else self.compressed.description

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return weight_bytes(self.spec, self.form) if self.compressed is None else self.compressed.total_bytes

    @property
    def gpu_peak_bytes(self) -> int:
        """Bytes that the card needs at the peak."""
        return self.ledger.peak_bytes()

    @property
    def fits(self) -> bool:
        """Whether the peak fits on the card."""
        return self.gpu_peak_bytes <= self.machine.accelerator.memory_bytes

    @property
    def token_seconds(self) -> float:
        """Lower bound of the seconds of a decode step: one token for every request."""
        return self.rates.least_decode_seconds(self.spec, self.read_bytes, self._read_cache_bytes)

    @property
    def tokens_per_second(self) -> float:
        """Upper bound of decoded tokens a second, over all requests of one card."""
        return self.requests / self.token_seconds

    @property
    def first_token_seconds(self) -> float:
        """Lower bound of the seconds to the first token, after a prompt of `length` tokens with no other request."""
        flops = 2 * layer_params(self.spec) * self.length
        if isinstance(rates := self.rates, CpuStepRates):
            return flops / rates.product_flop_s
        return max(flops / rates.product_flop_s, replace(self, requests=1, length=1).token_seconds)

    @property
    def predicted_tokens_per_second(self) -> float:
        """Predicted tokens a second of our engine in decode, over all requests of one card at `length` positions."""
        step = Step(tokens=self.requests, answers=self.requests, pairs=0, cache_bytes=self._read_cache_bytes)
        return self.requests / self.rates.step_seconds(self.spec, self.read_bytes, step)

    @property
    def predicted_first_token_seconds(self) -> float:
        """Predicted seconds of our engine to the first token of a prompt of `length` tokens, with no other request."""
        prompt = Step(tokens=self.length, answers=1, pairs=self.length**2 / 2, cache_bytes=0)
        read_bytes = replace(self, requests=1).read_bytes
        return self.rates.step_seconds(self.spec, read_bytes, prompt) + self.rates.first_token_s

    @property
    def rates(self) -> ServingRates:
        """The measured or assumed rates of the card."""
        if self.machine.is_cpu:
            on_cpu = self._weights_on_cpu
            return CpuStepRates(measured=self._measured_on_cpu, layers_as=on_cpu.layers_as, head_as=on_cpu.head_as)
        card = self.machine.accelerator
        scheme, head = self._scheme, self._coded_head
        rounds_inputs = scheme is not None and scheme.activations is not None
        peaks = [rate for rate in (card.rates.bf16, card.rates.fp16, card.rates.fp32) if rate is not None]
        narrow_peaks = [rate for rate in (card.rates.fp8, card.rates.int8) if rate is not None]
        return StepRates(
            bytes_per_second=card.bandwidth_gb_s * 1e9 * MEASURED.bandwidth,
            product_flop_s=max(peaks + narrow_peaks if rounds_inputs else peaks) * 1e12 * MEASURED.matmul,
            attention_flop_s=max(peaks) * 1e12 * by_head_size(MEASURED.attention_forward, self.spec.head_dim),
            packed=None if scheme is None else PackedProducts.of(scheme, on_hopper=self._is_on_hopper),
            head_bytes=None if head is None else head.bytes,
        )

    @property
    def _measured_on_cpu(self) -> CpuRates:
        """What `tightfit calibrate` measured of serving on this CPU."""
        measured = None if self.machine.calibration is None else self.machine.calibration.serving
        if measured is None:
            raise UserError("what serving takes on this CPU was not measured yet; run `tightfit calibrate`")
        return measured

    @property
    def _weights_on_cpu(self) -> CpuWeights | CpuFormat:
        """How this CPU holds the weights."""
        if self.compressed is None:
            return format_on_cpu(self.form, self.spec, self._measured_on_cpu)
        room_bytes = HOST_SHARE * self.machine.accelerator.memory_bytes
        return held_on_cpu(self.compressed, self.spec, frozenset(self._measured_on_cpu.products), room_bytes)

    @property
    def _coded_head(self) -> CodedHead | None:
        """The output projection, where it is quantized."""
        return None if self.compressed is None else self.compressed.head

    @property
    def _head_expanded_bytes(self) -> int:
        """Bytes of the output projection dequantized for a product, where kernels read too few rows of it packed."""
        if (head := self._coded_head) is None:
            return 0
        is_read = head.scheme.is_read_packed(self.spec.hidden_size)
        most = PackedProducts.of(head.scheme, on_hopper=self._is_on_hopper).most_tokens if is_read else 0
        expanded = head.scheme.expanded_bytes(self.spec.vocab_size, self.spec.hidden_size)
        return expanded if self.requests > most else 0

    @property
    def _is_on_hopper(self) -> bool:
        """Whether the card has Hopper's kernels."""
        return generation_of(self.machine.accelerator) == "hopper"

    @property
    def _read_cache_bytes(self) -> int:
        """Keys and values that a decode step of all requests reads: float32 on a CPU."""
        element_bytes = FLOAT32_BYTES if self.machine.is_cpu else 2
        return seen_cache_bytes(self.spec, self.requests, self.length, element_bytes, form=self.cache)

    @property
    def _scheme(self) -> Scheme | None:
        """The weights' quantization scheme; None where they are plain."""
        if self.compressed is not None:
            return self.compressed.scheme
        return None if self.form in PLAIN else Scheme(bits=8 if self.form == "q8_0" else 4)

    @property
    def read_bytes(self) -> float:
        """Bytes of weights that a step reads: all but an untied embedding; with one request one token's experts."""
        spec = self.spec
        embedding = 0 if spec.tied else spec.vocabulary_params
        is_plain = self.compressed is not None and self.compressed.plain_bytes > 0
        embedding_bytes = embedding * (2 if is_plain else self.weight_bytes / spec.params())
        active_share = spec.params(active=True) / spec.params() if self.requests == 1 else 1.0
        return (self.weight_bytes - embedding_bytes) * active_share

    @property
    def most_requests(self) -> int:
        """The most concurrent requests of `length` tokens that fit on the card."""
        logits_bytes = FLOAT32_BYTES * self.spec.vocab_size  # per request: a lower bound, which limits the bisection
        counts = range(1, self.machine.accelerator.memory_bytes // logits_bytes + 2)
        return bisect_left(counts, True, key=lambda count: not replace(self, requests=count).fits)

    def changes(self) -> list[str]:
        """Changes with which the model would fit, the smallest step of each kind."""
        found = []
        smaller = SMALLER[SMALLER.index(self.form) + 1 :] if self.form in SMALLER else SMALLER
        smaller = smaller if self.compressed is None else ()
        if form := next((each for each in smaller if replace(self, form=each).fits), None):
            found.append(f"smaller weights: --quantize {form}")
        if self.cache == "model" and replace(self, cache="fp8").fits:
            found.append("smaller keys and values: --cache-format fp8")
        if self.requests > 1 and (most := self.most_requests):
            found.append(f"fewer requests at a time: --batch {most}")
        lengths = (self.length >> shift for shift in range(1, 16) if self.length >> shift >= 64)
        if length := next((each for each in lengths if replace(self, length=each).fits), None):
            found.append(f"shorter requests: --context {length}")
        need = self.gpu_peak_bytes
        if card := next((c for c in larger_cards(self.machine.accelerator) if c.memory_bytes >= need), None):
            found.append(f"another card: {card.name}")
        return found

    def notes(self) -> Iterator[str]:
        """What a user should know besides the numbers, one sentence each."""
        if self.machine.ranks > 1:
            yield f"each of the {self.machine.ranks} cards serves a copy"
        if not self.machine.is_cpu and self.machine.accelerator.family != MEASURED_CARD:
            yield (
                f"times assume that this card reaches the shares of its peaks that an {MEASURED_CARD} reaches "
                "(docs/hardware.md)"
            )

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "model": self.model,
            "machine": self.machine.to_json(),
            "fits": self.fits,
            "gpu_peak_bytes": self.gpu_peak_bytes,
            "missing_bytes": max(0, self.gpu_peak_bytes - self.machine.accelerator.memory_bytes),
            "quantize": self.weights_name,
            "context": self.length,
            "batch": self.requests,
            "cache": self.cache,
            "tokens_per_second": self.tokens_per_second,
            "first_token_s": self.first_token_seconds,
            "predicted_tokens_per_second": self.predicted_tokens_per_second,
            "predicted_first_token_s": self.predicted_first_token_seconds,
            "most_requests": self.most_requests,
            "ledger": self.ledger.to_json()["lines"],
            "changes": [] if self.fits else self.changes(),
            "notes": list(self.notes()),
        }


def _coded(form: str, spec: ModelSpec) -> HeldWeights:
    """The weights of a dense model with its layers in one of `CODED`."""
    if spec.experts is not None or spec.latent is not None:
        raise UserError(
            f"--quantize is {form}, which is counted for dense models only; compress this one and plan the result, or "
            f"give one of {', '.join(FORMATS)}"
        )
    return replace(rounded_weights(CODED[form], spec), description=form)


def make_serving(
    model: str,
    spec: ModelSpec,
    machine: Machine,
    form: str,
    length: int | None,
    requests: int,
    cache: CacheFormat = "model",
    compressed: HeldWeights | None = None,
) -> Serving:
    """A Serving from the user's options, checked; `compressed` weights keep their format."""
    if form in CODED:
        form, compressed = "bf16", _coded(form, spec)
    if form not in FORMATS:
        raise UserError(f"--quantize is {form!r}; give one of {', '.join((*FORMATS, *CODED))}")
    wanted = min(4096, spec.max_positions) if length is None else length
    if not 1 <= wanted <= spec.max_positions:
        raise UserError(f"--context is {wanted}, but the model has {spec.max_positions} positions; give 1 to that many")
    if requests < 1:
        raise UserError(f"--batch is {requests}; give at least 1 request")
    serving = Serving(
        model=model,
        spec=spec,
        machine=machine,
        form=form,
        length=wanted,
        requests=requests,
        cache=cache,
        compressed=compressed,
    )
    _ = serving.rates  # raises for a CPU whose rates were not measured
    return serving
