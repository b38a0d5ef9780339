"""`python -m benchmarks.kernels`: every fused operation beside its peers, forward and backward, in one run.

To add an operation: one function that yields its cases, and a line in OPERATIONS.
"""

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from benchmarks.operations.case import CPU_PEERS, AbsentError, Case, Forward, MakePeer, Where
from benchmarks.operations.measure import Limits, Timing, extra_bytes, first_call_s, measure_limits, time_step
from tightfit.errors import UserError

OPERATIONS = {
    "rms_norm": "benchmarks.operations.norms:rms_norm_cases",
    "layer_norm": "benchmarks.operations.norms:layer_norm_cases",
    "rope": "benchmarks.operations.elementwise:rope_cases",
    "glu": "benchmarks.operations.elementwise:glu_cases",
    "cross_entropy": "benchmarks.operations.losses:cross_entropy_cases",
    "linear_cross_entropy": "benchmarks.operations.projections:linear_cross_entropy_cases",
    "attention": "benchmarks.operations.attentions:attention_cases",
}
"""Operation → the function that yields its cases; imported when asked for."""
ROUNDS = 25
FEWEST_ROUNDS = 7
MEASURING_S = 3.0
"""Steps so slow that so many rounds would take longer get fewer."""


@dataclass(frozen=True)
class Measurement:
    """One peer in one case; `note` says why there are no numbers."""

    operation: str
    shape: str
    dtype: str
    peer: str
    timing: Timing | None = None
    share_of_limit: float | None = None
    """Of the time that the machine's measured copy or matrix rate would need for the least possible work."""
    extra_bytes: int | None = None
    first_call_s: float | None = None
    difference: float | None = None
    """‖results − eager's‖ / ‖eager's‖, the worst of outputs and gradients."""
    note: str = ""


def bench_kernels(
    operations: Iterable[str], device: str, shape: str = "", peers: Sequence[str] = ()
) -> tuple[Limits, Iterator[Measurement]]:
    """The machine's limits, and the measurements as they are made, of cases whose shape contains `shape`.

    `peers` are measured alone where given; the first peer of a case, which they are compared with, still runs once.
    """
    chosen = {name: OPERATIONS.get(name) for name in operations} or dict(OPERATIONS)
    for name, source in chosen.items():
        if source is None:
            raise UserError(f"--op is {name!r}; give one of {', '.join(OPERATIONS)}")
    where = _where(device)
    cases = [case for source in chosen.values() for case in _cases(str(source), where) if shape in case.shape]
    _require_known(peers, cases)
    limits = measure_limits(where.device)
    return limits, (m for case in cases for m in _measure_case(case, where, limits, peers))


def _where(device: str) -> Where:
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("this benchmark needs a CUDA GPU and none is here; --device cpu checks tiny shapes without one")
    if device not in ("cuda", "cpu"):
        raise UserError(f"--device is {device!r}; give cuda or cpu")
    return Where(torch.device(device), tiny=device == "cpu")


def _cases(source: str, where: Where) -> Iterator[Case]:
    module, _, name = source.partition(":")
    made: Iterator[Case] = getattr(import_module(module), name)(where)
    return made


def _require_known(peers: Iterable[str], cases: list[Case]) -> None:
    known = dict.fromkeys(name for case in cases for name in case.peers)
    for peer in peers:
        if peer not in known:
            raise UserError(f"--peer is {peer!r}; give one of {', '.join(repr(name) for name in known)}")


def _measure_case(case: Case, where: Where, limits: Limits, peers: Sequence[str]) -> Iterator[Measurement]:
    chosen = [name for name in case.peers if name in (peers or case.peers)]
    if not chosen:
        return
    torch.manual_seed(0)
    bench = _Bench(case, where, limits)
    reference = next(iter(case.peers))
    if reference not in chosen:
        bench.compare_with(case.peers[reference])
    for name in chosen:
        if where.device.type == "cpu" and name not in CPU_PEERS:
            yield bench.without(name, "needs a GPU")
            continue
        yield bench.measure(name, case.peers[name])
        if where.device.type == "cuda":
            gc.collect()


class _Bench:
    """Inputs of one case, kept pristine, and the first peer's results to compare the others' with."""

    def __init__(self, case: Case, where: Where, limits: Limits) -> None:
        self.case, self.device, self.limits = case, where.device, limits
        self.inputs = case.inputs()
        self.dtype = str(self.inputs[0].dtype).removeprefix("torch.")
        self.leaves = [x for x in self.inputs if x.requires_grad]
        self.pristine = [x.detach().clone() for x in self.leaves]
        self.given: list[Tensor] = []
        self.given_pristine: list[Tensor] = []
        self.reference: list[Tensor] = []

    def without(self, peer: str, note: str) -> Measurement:
        """A peer that has no numbers."""
        return Measurement(self.case.operation, self.case.shape, self.dtype, peer, note=note)

    def compare_with(self, make: MakePeer) -> None:
        """Take this peer's results for the others', without measuring it."""
        self._difference(self._step(make()))
        self.given = []

    def measure(self, peer: str, make: MakePeer) -> Measurement:
        """Everything about one peer."""
        try:
            forward = make()
            return self._numbers(peer, forward)
        except AbsentError as absent:
            return self.without(peer, str(absent))
        except torch.OutOfMemoryError:
            return self.without(peer, "out of memory")
        except Exception as error:  # one peer that breaks in a way of its own must not cost the others' numbers
            return self.without(peer, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")

    def _numbers(self, peer: str, forward: Forward) -> Measurement:
        results: list[list[Tensor]] = []
        self.given = []
        self._restore()
        first = first_call_s(lambda: results.append(self._step(forward)), self.device)
        difference = self._difference(results.pop())
        self._restore()
        extra = extra_bytes(lambda: self._step(forward), self.device)
        warm_s = first_call_s(lambda: self._step(forward), self.device)
        rounds = max(FEWEST_ROUNDS, min(ROUNDS, int(MEASURING_S / warm_s)))
        timing = time_step(lambda: self._step(forward), self._restore, self.device, rounds)
        share = self.limits.ideal_ms(self.case.bound_by, self.case.work) / timing.p50_ms
        case = self.case
        return Measurement(case.operation, case.shape, self.dtype, peer, timing, share, extra, first, difference)

    def _step(self, forward: Forward) -> list[Tensor]:
        """Forward and backward: results and gradients."""
        made = forward(*self.inputs)
        made = (made,) if isinstance(made, Tensor) else made
        if not self.given:
            self._give(made)
        return [*made, *torch.autograd.grad(made, self.leaves, self.given)]

    @torch.no_grad()
    def _give(self, made: tuple[Tensor, ...]) -> None:
        """The same gradients for every peer, each in the memory order of its own results."""
        if not self.given_pristine:
            self.given_pristine = [torch.randn_like(x) if x.ndim else torch.ones_like(x) for x in made]
        self.given = [torch.empty_like(x).copy_(values) for x, values in zip(made, self.given_pristine, strict=True)]

    @torch.no_grad()
    def _restore(self) -> None:
        """Peers may write over their inputs and over the gradients they are given."""
        for tensors, pristine in ((self.leaves, self.pristine), (self.given, self.given_pristine)):
            for tensor, before in zip(tensors, pristine, strict=False):  # no gradients are given before the first step
                tensor.copy_(before)

    def _difference(self, found: list[Tensor]) -> float:
        if not self.reference:
            self.reference = [x.detach().clone() for x in found]
        pairs = zip(found, self.reference, strict=True)
        return max((_wide_norm(a.detach() - b) / _wide_norm(b).clamp(min=1e-30)).item() for a, b in pairs)


def _wide_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float32)
