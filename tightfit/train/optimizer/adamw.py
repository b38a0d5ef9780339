"""AdamW with float32 master weights where the model computes in fewer bits.

Mixed precision costs 16 bytes a parameter: 2 weights + 2 gradients + 4 master + 4 + 4 moments. A float32 copy of all
gradients would add 4 more for the length of the step, so parameters are updated in buckets: a bucket's gradients are
widened, torch's own fused AdamW updates its masters, the result is narrowed back, and the copies are freed.
States exist from the start (not from the first step), so the first step needs no more memory than the others.
Where ranks hold shards of the parameters (FSDP2), AdamW updates the rows that are here. Shards of a run in mixed
precision are float32 and are the masters themselves; the engine narrows what it gathers.
Moments of other formats, and weights rounded stochastically, are updated by our own kernels (updaters.py), which read
gradients as they are. States of matrices may live on the host (levers/offload.py, streamed_updater.py); an update is
then on its way when `step` returns, and waited for where the weight is used.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tightfit.collectives.shards import (
    as_dtensor,
    copy_whole,
    first_element,
    is_shard,
    like_shard,
    local,
    pieces,
    splits_of,
)
from tightfit.errors import UserError
from tightfit.jobs.job import Optimizer
from tightfit.jobs.levers import Levers
from tightfit.jobs.state_format import is_torch_adamw, state_format
from tightfit.kernels.gradient_norm import gradient_norm
from tightfit.models.decoder import Decoder
from tightfit.train.engine import Engine
from tightfit.train.optimizer.backward_update import Apply, BackwardUpdate
from tightfit.train.optimizer.offloading import Offloading
from tightfit.train.optimizer.streamed_updater import StreamedUpdater
from tightfit.train.optimizer.updaters import FormatUpdater, TorchUpdater, Updater

BUCKET_BYTES = 256 * 2**20
NO_LEVERS = Levers()
PREVIOUS_NORMS = "previous_norms/all"


@dataclass
class Bucket:
    """Parameters updated together: names, model parameters, and what AdamW updates.

    Those are float32 copies of narrow parameters, the rows of shards that are here, or the parameters themselves.
    """

    names: list[str]
    parameters: list[Tensor]
    masters: list[Tensor]
    updater: Updater

    @property
    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parameters and what is updated for them."""
        return zip(self.parameters, self.masters, strict=True)


class MasterAdamW:
    """AdamW over a model's parameters; with `compute_dtype` the model is narrowed to it over float32 masters.

    Shards are not narrowed: they must be float32 then, and count as masters.
    """

    def __init__(
        self, model: nn.Module, settings: Optimizer, compute_dtype: torch.dtype | None = None,
        levers: Levers = NO_LEVERS, seed: int = 0, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.settings, self.has_masters, self.levers, self.seed = settings, compute_dtype is not None, levers, seed
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.is_sharded = any(is_shard(p) for _, p in named)
        self.splits = splits_of(model)
        self.gradients_stay = False
        """Zero gradients where they lie instead of freeing them: set where they lie in an engine's buckets."""
        self.stages, self.copied = 1, frozenset[str]()
        """Ranks of a pipeline, which hold other parameters each, and those of ours that another one counts."""
        self.engine: Engine | None = None
        """Who makes whole steps in our place; the parameters are then its own, and there are none here."""
        self.offloading = None
        if levers.offload != "none":
            self.offloading = Offloading(named, levers, device or named[0][1].device, compute_dtype)
        self.buckets = [
            self._bucket(part, settings.weight_decay if decayed else 0.0, compute_dtype)
            for decayed in (True, False)
            for part in _split([(n, p) for n, p in named if decays(n, p) is decayed], self._bucket_bytes())
        ]
        if self.offloading is not None:
            self.offloading.open(model, named)
        self.in_backward = self._updates_in_backward() if levers.update_in_backward else None

    def _bucket_bytes(self) -> int | None:
        if self.levers.update_in_backward or self.offloading is not None:
            return 0
        return BUCKET_BYTES if self.widens else None

    def _updates_in_backward(self) -> BackwardUpdate:
        updates: list[tuple[Tensor, Apply]] = [(b.parameters[0], partial(self._update, b)) for b in self.buckets]
        late = [] if self.offloading is None else [self.offloading.link.go_on]
        return BackwardUpdate(updates, self.settings.clip_norm, late)

    def _bucket(
        self, named: list[tuple[str, nn.Parameter]], weight_decay: float, compute_dtype: torch.dtype | None
    ) -> Bucket:
        names, parameters = [n for n, _ in named], [p for _, p in named]
        if self.offloading is not None:
            if self.offloading.is_away(names[0]):
                return self._bucket_away(names[0], parameters[0], weight_decay)
            self.offloading.bring(parameters[0])
        masters: list[Tensor] = [local(p) for p in parameters]
        if self.widens:
            masters = [p.data.float() for p in parameters]  # the very storage of a float32 model: no second copy
            for p in parameters:
                p.data = p.data.to(compute_dtype)
        firsts = [first_element(as_dtensor(p, self.splits.get(n))) for n, p in named]
        return Bucket(names, [*parameters], masters, self._updater(names, masters, firsts, weight_decay))

    def _bucket_away(self, name: str, parameter: nn.Parameter, weight_decay: float) -> Bucket:
        """One matrix whose states live on the host."""
        assert self.offloading is not None
        form = state_format(self.levers, wide=parameter.dtype == torch.float32)
        updater = StreamedUpdater(self.offloading.link, form, self.settings, weight_decay, self._rounding_seed)
        return Bucket([name], [parameter], [self.offloading.take(updater, name, parameter)], updater)

    @property
    def _rounding_seed(self) -> int | None:
        return self.seed if self.levers.rounding == "stochastic" else None

    def _updater(self, names: list[str], masters: list[Tensor], firsts: list[int], weight_decay: float) -> Updater:
        wide = masters[0].dtype == torch.float32
        if is_torch_adamw(self.levers, wide=wide):
            return TorchUpdater(masters, self.settings, weight_decay)
        form = state_format(self.levers, wide=wide)
        return FormatUpdater(names, masters, form, self.settings, weight_decay, firsts, seed=self._rounding_seed)

    @property
    def widens(self) -> bool:
        """Whether masters are copies in another dtype than the parameters'."""
        return self.has_masters and not self.is_sharded

    @property
    def gradients(self) -> list[Tensor]:
        """The model's gradients as backward left them; of shards, the rows that are here."""
        return [local(p.grad) for bucket in self.buckets for p in bucket.parameters if p.grad is not None]

    @property
    def is_whole(self) -> bool:
        """Whether every parameter is here, all of it."""
        return not self.is_sharded and not self.splits and self.stages == 1 and self.engine is None

    @torch.no_grad()
    def squares(self, world: int) -> Tensor:
        """Σ g² of what is here, each over the number of the model's `world` ranks that have the same: Σ over them is
        that of all gradients."""
        by_copies: dict[int, list[Tensor]] = {}
        for bucket in self.buckets:
            for name, p in zip(bucket.names, bucket.parameters, strict=True):
                if p.grad is not None and name not in self.copied:
                    by_copies.setdefault(world // pieces(p, self.splits.get(name)), []).append(local(p.grad))
        parts = [global_norm(found).double().square() / copies for copies, found in by_copies.items()]
        return torch.stack(parts).sum()

    @torch.no_grad()
    def step(self, lr: float, gradient_factor: Tensor | None = None) -> None:
        """Update with gradients multiplied by `gradient_factor` (clipping and unscaling), then drop them."""
        for bucket in self.buckets:
            self._update(bucket, lr, gradient_factor)
        if self.offloading is not None:
            self.offloading.link.go_on()

    def _update(self, bucket: Bucket, lr: float, factor: Tensor | None) -> None:
        widened = self.widens and bucket.updater.wants_own_dtype
        gradients = [self._widened(*pair) if widened else _gradient(pair[0]) for pair in bucket.pairs]
        bucket.updater.update(gradients, bucket.parameters if self.widens else None, lr, factor)
        for parameter, master in bucket.pairs:
            if master is not parameter:
                master.grad = None
            if not widened:
                self._let_go(parameter)

    def _widened(self, parameter: Tensor, master: Tensor) -> Tensor | None:
        """A copy of the gradient, which is let go of."""
        gradient = None if parameter.grad is None else parameter.grad.to(master.dtype)
        self._let_go(parameter)
        return gradient

    def drop_gradients(self) -> None:
        """Forget the gradients of a step that must not be taken."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                self._let_go(parameter)

    def _let_go(self, parameter: Tensor) -> None:
        if self.gradients_stay and parameter.grad is not None:
            parameter.grad.zero_()
        else:
            parameter.grad = None

    def stream_weights(self, model: Decoder) -> None:
        """Bring weights that live on the host before each layer's forward, as that is now."""
        if self.offloading is not None and self.offloading.stream is not None:
            self.offloading.stream.wrap(list(model.layers))

    def state(self) -> dict[str, Tensor]:
        """Every state tensor by `kind/parameter name`; masters included where they exist. Of shards, shards."""
        if self.offloading is not None:
            self.offloading.synchronize()
        return dict(self._state_tensors())

    def _state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self.buckets:
            for index, (name, (parameter, master)) in enumerate(zip(bucket.names, bucket.pairs, strict=True)):
                yield f"step/{name}", bucket.updater.step(index)
                kinds = bucket.updater.states(index) | ({"master": master} if self.has_masters else {})
                for kind, tensor in kinds.items():
                    held = like_shard(tensor, parameter) if is_shard(parameter) else tensor
                    yield f"{kind}/{name}", as_dtensor(held, self.splits.get(name))
        if self.in_backward is not None:
            yield PREVIOUS_NORMS, self.in_backward.previous_norms

    @torch.no_grad()
    def load_state(self, saved: Mapping[str, Tensor], source: str) -> None:
        """Copy saved states in; anything missing, left over or of another shape is an error."""
        own = self.state()
        if odd := sorted(own.keys() ^ saved.keys()):
            raise UserError(f"{source} does not fit this model: optimizer state {odd[0]} is on one side only")
        for name, tensor in own.items():
            stored = saved[name]
            if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
                raise UserError(
                    f"{source}: {name} is {stored.dtype} {list(stored.shape)}, "
                    f"this run needs {tensor.dtype} {list(tensor.shape)}"
                )
            copy_whole(tensor, stored)
        for bucket in self.buckets:
            for index, name in enumerate(bucket.names):
                bucket.updater.set_step(index, saved[f"step/{name}"])


def _gradient(parameter: Tensor) -> Tensor | None:
    """As backward left it; of a shard, the rows that are here."""
    return None if parameter.grad is None else local(parameter.grad)


def decays(name: str, parameter: Tensor) -> bool:
    """Weight decay is for matrices: norms, biases and learned positions go without."""
    return parameter.ndim >= 2 and not name.startswith("positions.")


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """√Σ g² over all gradients, in float32 whatever their dtype."""
    return gradient_norm(list(gradients))


def clip_factor(norm: Tensor, largest: float) -> Tensor:
    """What gradients of global `norm` are multiplied by so that it does not exceed `largest`."""
    return (largest / (norm + 1e-6)).clamp(max=1.0)


def _split(named: list[tuple[str, nn.Parameter]], bucket_bytes: int | None) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Consecutive runs of at most `bucket_bytes` of float32 gradients each (one parameter may exceed it alone)."""
    run: list[tuple[str, nn.Parameter]] = []
    held = 0
    for name, parameter in named:
        size = 4 * parameter.numel()
        if run and bucket_bytes is not None and held + size > bucket_bytes:
            yield run
            run, held = [], 0
        run.append((name, parameter))
        held += size
    if run:
        yield run
