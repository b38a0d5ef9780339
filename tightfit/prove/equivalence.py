"""The equivalence check: N ranks against one process on the same rows, step by step, and where they first differ.

All ranks train as the layout says. The first rank also trains the whole model alone (the truth), without levers, on the
same micro-batches one after another. The initial weights are compared and, in every step, the loss, the gradient norm,
every gradient and every updated weight, gathered to the first rank. Copies on several ranks (replicas, replicated
norms, both copies of a tied embedding) must be equal to the bit.

The error of a tensor is ‖found − truth‖ / ‖truth‖ in float64. For gradients the denominator is at least a thousandth of
the norm of all gradients, as some are pure rounding error (biases of keys, without rope). In float32 another order of
summation makes errors around 1e-6; a missing or doubled term is a share of the gradient. Differences are sorted in the
order of computation: loss, gradients from the output back to the embedding, weights. So the first gradient named is the
one nearest to the fault; later ones in backward may be wrong because of it.
Under schedule 2bw the single process computes gradients with the weights of one update before, as that schedule does.
Limits: the first rank must hold the whole model in float32 beside its shards (use a miniature of a large one); lossy
levers differ, as they should. A job that trains adapters trains adapters here too, on a frozen model of plain weights.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tightfit.collectives.shards import as_dtensor, local, local_region, splits_of
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.levers.adapter import adapters, attach, initialise
from tightfit.models.blank import blank_decoder
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.parallel.gathering import gather_to_first
from tightfit.parallel.ranks import Ranks
from tightfit.prove.check_target import CheckTarget
from tightfit.train.assembly import Fill, assemble, unfilled
from tightfit.train.optimizer.adamw import MasterAdamW
from tightfit.train.precision import LossScale
from tightfit.train.step import StepResult, train_step

TOLERANCE = 1e-4
LEAST_SHARE = 1e-3
"""The least denominator of a gradient's error, as a share of the norm of all gradients."""
LEAST_WEIGHT = 1e-2
"""The least denominator of a weight's error, per element (biases begin at zero): ten updates at the check's learning
rate."""
LEAST_NUMBER = 1e-6
PRUNED_BELOW = 0.02
"""Weights that begin as zeros where a job keeps zeros: a tenth of those of a miniature."""
Look = Callable[[str], None]


@dataclass(frozen=True)
class Difference:
    """The error of one value: `kind` is start, loss, norm, gradient, weight or copy; `step` counts from 1.

    A copy, held by `rank`, is equal (0) or not (1).
    """

    step: int
    kind: str
    name: str
    layer: int | None
    error: float
    rank: int = 0

    def sentence(self) -> str:
        """The outcome in one sentence."""
        where = f"{self.kind} of {self.name}" if self.name else f"the {self.kind}"
        inside = f" (layer {self.layer})" if self.layer is not None else ""
        if self.kind == "copy":
            return f"step {self.step}: the {where}{inside} on rank {self.rank} is not what other ranks hold"
        return f"step {self.step}: {where}{inside} is off by {self.error:.2g} of its size"


@dataclass(frozen=True)
class Verdict:
    """Numbers of comparisons and differences, the first difference (None: equal), and the largest error."""

    ranks: int
    steps: int
    compared: int
    different: int
    first: Difference | None
    largest: Difference
    losses: tuple[float, ...]

    @property
    def same(self) -> bool:
        """Whether the ranks train as one process does."""
        return self.first is None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"same": self.same, **asdict(self)}


@dataclass
class TrainedModel:
    """A model with its optimizer, trained by all ranks or by a single process."""

    decoder: Decoder
    module: nn.Module
    optimizer: MasterAdamW
    ranks: Ranks
    device: torch.device

    older: dict[str, Tensor] | None = None
    """Weights before the last update, with which a single process computes gradients under schedule 2bw."""

    def step(self, target: CheckTarget, number: int, look: Look) -> StepResult:
        """One step on this rank's rows."""
        if self.older is not None:
            newest, look = _copies(self.decoder), self._then_newest(look)
            _set_weights(self.decoder, self.older)
            self.older = newest
        batches = target.micro_batches(number)[self.ranks.rank :: self.ranks.world]
        lr = target.settings.lr
        return train_step(self.module, self.optimizer, batches, self.device, lr, LossScale(), look, self.ranks)

    def _then_newest(self, look: Look) -> Look:
        """`look`, then put the newest weights back before the optimizer updates them."""

        def looked(phase: str) -> None:
            look(phase)
            if phase == "optimizer" and self.older is not None:
                _set_weights(self.decoder, self.older)

        return looked


def _copies(decoder: Decoder) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}


@torch.no_grad()
def _set_weights(decoder: Decoder, weights: dict[str, Tensor]) -> None:
    for name, parameter in decoder.named_parameters():
        parameter.copy_(weights[name])


def build_trained(target: CheckTarget, mesh: DeviceMesh | None, device: torch.device) -> TrainedModel:
    """The target's model with weights from its seed, parallelised over `mesh`."""
    decoder, fill = _whole(target, device) if target.adapter.rank is None else _with_adapters(target, device)
    module, optimizer = assemble(
        decoder, mesh, target.layout, target.levers, target.precision, target.settings, device, fill, target.seed
    )
    return TrainedModel(decoder, module, optimizer, Ranks.of(mesh), device)


def _whole(target: CheckTarget, device: torch.device) -> tuple[Decoder, Fill]:
    """A model without values, and the function that initialises it from the target's seed."""

    def fill(model: Decoder) -> None:
        torch.manual_seed(target.seed)
        init_weights(model)
        if target.settings.keep_zeros:
            _prune(model)

    return unfilled(target.spec, target.layout, target.precision, device, target.levers), fill


@torch.no_grad()
def _prune(model: Decoder) -> None:
    """Zero all small weights, of a rank's shards as of the whole model, so that there are zeros to keep."""
    for parameter in model.parameters():
        own = local(parameter)
        own.masked_fill_(own.abs() < PRUNED_BELOW, 0.0)


def _with_adapters(target: CheckTarget, device: torch.device) -> tuple[Decoder, Fill]:
    """A frozen model from the target's seed, and the function that initialises its adapters; B is not zero, as A would
    then have no gradients."""
    decoder = blank_decoder(target.spec, device, torch.float32)
    torch.manual_seed(target.seed)
    init_weights(decoder)
    attach(decoder, target.adapter, torch.float32)

    def fill(model: Decoder) -> None:
        initialise(model, target.seed)
        generator = torch.Generator().manual_seed(target.seed)
        with torch.no_grad():
            for _, b in adapters(model).values():
                b.copy_(0.1 * torch.randn(b.shape, generator=generator))

    return decoder, fill


def compare(
    target: CheckTarget, mesh: DeviceMesh, device: torch.device, *, steps: int = 2, tolerance: float = TOLERANCE
) -> Verdict:
    """Train `steps` steps on all ranks and on one, and compare. All ranks call this and return the same verdict."""
    many = build_trained(target, mesh, device)
    one = build_trained(_alone(target), None, device) if many.ranks.first else None
    if one is not None and target.layout.has_two_versions:
        one.older = _copies(one.decoder)
    found = _Comparison(many.ranks, tolerance)
    found.tensors(0, "start", _weights(many), None if one is None else _weights(one))
    losses = [_compare_step(target, number, many, one, found) for number in range(1, steps + 1)]
    return many.ranks.broadcast(found.verdict(steps, losses))


def _alone(target: CheckTarget) -> CheckTarget:
    return replace(target, layout=Layout(micro_batch=target.layout.micro_batch), levers=Levers())


def _compare_step(
    target: CheckTarget, number: int, many: TrainedModel, one: TrainedModel | None, found: "_Comparison"
) -> float:
    """Run and compare one step of `many` and `one`; gradients are compared just before the optimizer uses them."""
    truth: dict[str, Tensor] = {}
    whole_batch = replace(_alone(target), passes=target.passes * target.layout.data)

    def keep(phase: str) -> None:
        if phase == "optimizer" and one is not None:
            truth.update((name, gradient.clone()) for name, gradient in _gradients(one).items())

    def look(phase: str) -> None:
        if phase == "optimizer":
            found.tensors(number, "gradient", _gradients(many), truth if one is not None else None)

    expected = one.step(whole_batch, number, keep) if one is not None else None
    result = many.step(target, number, look)
    if expected is not None:
        found.number(number, "loss", result.loss, expected.loss)
        found.number(number, "norm", result.gradient_norm, expected.gradient_norm)
    held = _weights(many)
    found.tensors(number, "weight", held, None if one is None else _weights(one))
    found.copies(number, held)
    return result.loss


def _weights(of: TrainedModel) -> dict[str, Tensor]:
    splits, offloading = splits_of(of.decoder), of.optimizer.offloading
    own = {name: p.detach() for name, p in of.decoder.named_parameters()}
    own |= {} if offloading is None else offloading.streamed_weights(of.decoder)
    return {name: as_dtensor(weight, splits.get(name)) for name, weight in own.items()}


def _gradients(of: TrainedModel) -> dict[str, Tensor]:
    splits = splits_of(of.decoder)
    named = ((name, p.grad) for name, p in of.decoder.named_parameters())
    return {name: as_dtensor(grad, splits.get(name)) for name, grad in named if grad is not None}


class _Comparison:
    """Collects differences; the first process has the truth."""

    def __init__(self, ranks: Ranks, tolerance: float) -> None:
        self.ranks, self.tolerance = ranks, tolerance
        self.found: list[Difference] = []

    def number(self, step: int, kind: str, ours: float, theirs: float) -> None:
        """Compare one number that all ranks have."""
        self.found.append(Difference(step, kind, "", None, abs(ours - theirs) / max(abs(theirs), LEAST_NUMBER)))

    def tensors(self, step: int, kind: str, ours: dict[str, Tensor], theirs: dict[str, Tensor] | None) -> None:
        """Compare tensors, gathered from all ranks, with the truth on the first process."""
        everything = 0.0
        if theirs is not None and kind == "gradient":
            everything = sum(float(t.double().square().sum()) for t in theirs.values()) ** 0.5
        for name, tensor in gather_to_first(ours, self.ranks):
            if theirs is None:
                continue
            error = float("inf")
            if tensor is not None and name in theirs:
                truth = theirs[name].double()
                least = LEAST_SHARE * everything if kind == "gradient" else LEAST_WEIGHT * truth.numel() ** 0.5
                error = float((tensor.to(truth.device).double() - truth).norm()) / max(float(truth.norm()), least)
            self.found.append(Difference(step, kind, name, _layer(name), error))

    def copies(self, step: int, parts: dict[str, Tensor]) -> None:
        """Compare shards that several ranks hold with those of the first rank that has them."""
        own = {(name, local_region(tensor)): _digest(tensor) for name, tensor in parts.items()}
        by_rank: list[Any] = [own]
        if self.ranks.processes > 1:
            by_rank = [None] * self.ranks.processes
            dist.all_gather_object(by_rank, own)
        known: dict[Any, bytes] = {}
        for rank, held in enumerate(by_rank):
            for (name, part), digest in held.items():
                if (name, part) in known:
                    error = float(digest != known[name, part])
                    self.found.append(Difference(step, "copy", name, _layer(name), error, rank))
                known.setdefault((name, part), digest)

    def verdict(self, steps: int, losses: Sequence[float]) -> Verdict:
        """The verdict, with differences in the order of computation."""
        found = sorted(self.found, key=_order)
        wrong = [d for d in found if not d.error <= self.tolerance]
        nothing = Difference(0, "start", "", None, 0.0)
        largest = max(found, key=lambda d: float("inf") if d.error != d.error else d.error, default=nothing)
        first = wrong[0] if wrong else None
        return Verdict(self.ranks.processes, steps, len(found), len(wrong), first, largest, tuple(losses))


def _digest(tensor: Tensor) -> bytes:
    """A hash of the local tensor's bytes."""
    return hashlib.blake2b(local(tensor).contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()).digest()


KIND_ORDER = {"start": 0, "loss": 1, "gradient": 2, "norm": 3, "weight": 4, "copy": 5}
"""The norm is computed from gradients, so it comes after them."""


def _order(found: Difference) -> tuple[int, int, float]:
    """Sort key: step, kind, then the order of backward."""
    order = KIND_ORDER[found.kind]
    if found.name.startswith(("embed.", "positions.")):
        return found.step, order, float("inf")
    return found.step, order, -float("inf") if found.layer is None else -float(found.layer)


def _layer(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layers" else None
