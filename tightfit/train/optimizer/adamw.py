"""AdamW with float32 master weights for models in 16 bits.

Mixed precision costs 16 bytes a parameter: 2 weights + 2 gradients + 4 master + 4 + 4 moments. Casting all gradients to
float32 at once would add 4 more during the update, so parameters are updated in buckets: cast a bucket's gradients, run
torch's fused AdamW on its masters, cast the result back, free the copies. States are allocated at construction, so the
first step needs no more memory than the others.

Under FSDP2 a rank updates its shards. In mixed precision these are float32 and are the masters themselves (unless
masters are on the host); FSDP2 casts shards to 16 bits before it all-gathers them. Moments of other formats and
stochastic rounding are done by our kernels (updaters.py), which take gradients of any dtype. States of matrices may be
offloaded to the host (levers/offload.py, streamed_updater.py): their updates are still in flight when `step` returns,
and the forward pass waits for an update before it uses the weight.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tightfit.collectives.shards import (
    as_dtensor,
    copy_whole,
    first_element,
    is_shard,
    like_shard,
    local,
    shard_count,
    splits_of,
)
from tightfit.errors import UserError
from tightfit.jobs.job import Optimizer
from tightfit.jobs.levers import Levers
from tightfit.jobs.state_format import Format, is_torch_adamw, state_format
from tightfit.kernels.optimizer.gradient_norm import gradient_norm
from tightfit.levers.fake_quantize import SCALE_PREFIX
from tightfit.levers.optimizer_states import BF16, FP32, state_kind
from tightfit.levers.policy.updates import BUCKET_BYTES
from tightfit.models.decoder import Decoder
from tightfit.parallel.ranks import Ranks
from tightfit.train.engine import Engine
from tightfit.train.optimizer.backward_update import BackwardUpdate, SplitWeight, Update
from tightfit.train.optimizer.offloading import Named, Offloading
from tightfit.train.optimizer.streamed_updater import StreamedUpdater
from tightfit.train.optimizer.updaters import DeviceNumbers, FormatUpdater, TorchUpdater, Updater

if TYPE_CHECKING:  # buffered_steps.py imports this file
    from tightfit.train.buffered_steps import BufferedSteps

NO_LEVERS = Levers()
PREVIOUS_NORMS = "previous_norms/all"
"""State by which updates inside backward clip. A checkpoint may lack it (the lever was set later) or have it unused."""
OLDER_WEIGHTS = "older/"
"""Weights before the last update, which a pipeline without flushes still needs; a checkpoint may lack these too."""
STATES_REMEDY = "set levers.optimizer_states back to what the run was made with, or take another checkpoint (--from)"


@dataclass
class Bucket:
    """Parameters updated together.

    `masters` is what AdamW updates: float32 copies of 16-bit parameters, local shards, or the parameters themselves.
    """

    names: list[str]
    parameters: list[Tensor]
    masters: list[Tensor]
    updater: Updater
    decays: bool = True
    """Whether weight decay and L1 apply: to matrices."""

    @property
    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, master) pairs."""
        return zip(self.parameters, self.masters, strict=True)


class MasterAdamW:
    """AdamW over a model's parameters; with `compute_dtype` the model is cast to it and float32 masters are kept.

    FSDP2 shards are not cast: they must be float32 and are the masters.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Optimizer,
        compute_dtype: torch.dtype | None = None,
        levers: Levers = NO_LEVERS,
        seed: int = 0,
        device: torch.device | None = None,
        *,
        keep_gradient_memory: bool = False,
        pipeline_ranks: int = 1,
        counted_elsewhere: frozenset[str] = frozenset(),
        not_replicated: frozenset[str] = frozenset(),
        module: nn.Module | None = None,
        extra_parameters: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        """`device` is where offloaded states are updated; `seed` seeds stochastic rounding.

        `keep_gradient_memory` zeroes gradients after every step but the first instead of freeing them: under DDP they
        are views of its buckets; gradients of `not_replicated` (experts, which differ from rank to rank) are freed.
        Each of `pipeline_ranks` has an optimizer of its own parameters; those of `counted_elsewhere` are copies of
        another rank's (a tied embedding), which the gradient norm must count once. `module` runs forward where `model`
        itself does not: FSDP2's modules are looked for in it. `extra_parameters` beside the model's (learned scales)
        stay float32, and are saved with the states, as the model's files do not hold them.
        """
        self.settings, self.has_masters, self.levers, self.seed = settings, compute_dtype is not None, levers, seed
        self.keep_gradient_memory, self.pipeline_ranks = keep_gradient_memory, pipeline_ranks
        self.counted_elsewhere, self.has_stepped = counted_elsewhere, False
        self.extra_parameters = dict(extra_parameters or {})
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        named += self.extra_parameters.items()
        self._not_replicated = {id(p) for name, p in named if name in not_replicated}
        self.is_sharded = any(is_shard(p) for _, p in named)
        self.splits = splits_of(model)
        self.engine: Engine | None = None
        """An engine (DeepSpeed) that runs whole steps; it owns the parameters, and there are no buckets here."""
        self.buffered: BufferedSteps | None = None
        """Runs the steps of a pipeline that is not flushed between them."""
        sharded = module if self.is_sharded else None
        self.offloading = Offloading.of_levers(named, levers, device, compute_dtype, sharded)
        self.buckets = [
            replace(self._bucket(part, settings.weight_decay if decayed else 0.0, compute_dtype), decays=decayed)
            for decayed in (True, False)
            for part in self._parts([(n, p) for n, p in named if decays(n, p) is decayed])
        ]
        if self.offloading is not None:
            assert isinstance(model, Decoder)
            self.offloading.finish(model, named)
        self.in_backward = self._backward_update() if levers.update_in_backward else None

    @property
    def _updates_apart(self) -> bool:
        """Whether each matrix is updated separately, at its own time."""
        return self.levers.update_in_backward or self.offloading is not None

    def _parts(self, named: Named) -> Iterator[Named]:
        """Parameters grouped by bucket: matrices one by one where updated separately, all others up to BUCKET_BYTES."""
        if self._updates_apart:
            yield from ([(name, p)] for name, p in named if p.ndim > 1)
            named = [(name, p) for name, p in named if p.ndim == 1]
        yield from _split(named, BUCKET_BYTES if self.casts_gradients else None)

    def _backward_update(self) -> BackwardUpdate:
        """Updates inside backward: matrices early, norms and biases late."""
        early: list[Update] = []
        late: list[Update] = []
        for bucket in self.buckets:
            weights = [SplitWeight(p, self.splits.get(n)) for n, p in zip(bucket.names, bucket.parameters, strict=True)]
            is_matrix = bucket.parameters[0].ndim > 1
            (early if is_matrix else late).append(Update(weights, partial(self._update, bucket)))
        after_backward = [] if self.offloading is None else [self.offloading.link.flush_deferred]
        return BackwardUpdate(early, self.settings.clip_norm, late, after_backward)

    def _bucket(self, named: Named, weight_decay: float, compute_dtype: torch.dtype | None) -> Bucket:
        names, parameters = [n for n, _ in named], [p for _, p in named]
        firsts = [first_element(as_dtensor(p, self.splits.get(n))) for n, p in named]
        if self.offloading is not None:
            if self.offloading.is_offloaded(names[0]):
                return self._offloaded_bucket(names[0], parameters[0], weight_decay, firsts[0])
            for parameter in parameters:
                self.offloading.move_to_gpu(parameter)
        masters: list[Tensor] = [local(p) for p in parameters]
        if self.casts_gradients:
            # Where the model is float32, `float` returns the same storage: no copy.
            masters = [local(p.data).float() for p in parameters]
            for name, p in named:
                if name not in self.extra_parameters:
                    self._place(p, local(p.data).to(compute_dtype))
        updater = self._updater(names, masters, firsts, weight_decay)
        return Bucket(names=names, parameters=[*parameters], masters=masters, updater=updater)

    def _place(self, parameter: nn.Parameter, part: Tensor) -> None:
        if self.offloading is None:
            parameter.data = part
        else:
            self.offloading.shards.place(parameter, part)

    def _offloaded_bucket(self, name: str, parameter: nn.Parameter, weight_decay: float, first: int) -> Bucket:
        """One matrix with offloaded states; `first` as in `Offloading.offload`."""
        assert self.offloading is not None
        updater = StreamedUpdater(
            link=self.offloading.link,
            form=state_format(self.levers, wide=parameter.dtype == torch.float32),
            settings=self.settings,
            weight_decay=weight_decay,
            seed=self._rounding_seed,
            after_update=partial(self._free_gradient, parameter) if self.keep_gradient_memory else None,
        )
        master = self.offloading.offload(updater, name, parameter, first)
        return Bucket(names=[name], parameters=[parameter], masters=[master], updater=updater)

    @property
    def _rounding_seed(self) -> int | None:
        return self.seed if self.levers.rounding == "stochastic" else None

    def _updater(self, names: list[str], masters: list[Tensor], firsts: list[int], weight_decay: float) -> Updater:
        wide = masters[0].dtype == torch.float32
        form = state_format(self.levers, wide=wide)
        if is_torch_adamw(self.levers, wide=wide) or self._are_plain(masters, form):
            return TorchUpdater(masters, self.settings, weight_decay)
        return FormatUpdater(names, masters, form, self.settings, weight_decay, firsts, seed=self._rounding_seed)

    def _are_plain(self, masters: list[Tensor], form: Format) -> bool:
        """Whether these are vectors, while matrices are updated separately, whose moments have the weights' dtype in
        this format: one launch of torch's AdamW updates them all."""
        own = {torch.float32: FP32, torch.bfloat16: BF16}
        are_vectors = self._updates_apart and all(master.ndim == 1 for master in masters)
        kept = all(state_kind(form, master) is own.get(master.dtype) for master in masters)
        return are_vectors and kept and self._rounding_seed is None

    @property
    def casts_gradients(self) -> bool:
        """Whether masters are float32 copies of 16-bit parameters, so that gradients are cast for the update.

        FSDP2's float32 shards are the masters themselves, unless masters are on the host.
        """
        return self.has_masters and (not self.is_sharded or self.offloading is not None)

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that backward left; of sharded parameters, the local shards."""
        return [local(p.grad) for bucket in self.buckets for p in bucket.parameters if p.grad is not None]

    @torch.no_grad()
    def sum_extra_gradients(self, ranks: Ranks) -> None:
        """All-reduce the gradients of `extra_parameters`, which DDP and FSDP2 do not know, in one call."""
        own = [p.grad for p in self.extra_parameters.values() if p.grad is not None]
        if not own:
            return
        summed = ranks.sum_over_all(torch.cat([gradient.flatten() for gradient in own]))
        for gradient, part in zip(own, summed.split([gradient.numel() for gradient in own]), strict=True):
            gradient.copy_(part.view_as(gradient))

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds every parameter whole."""
        return not self.is_sharded and not self.splits and self.pipeline_ranks == 1 and self.engine is None

    @torch.no_grad()
    def squares(self, world: int) -> Tensor:
        """This rank's part of Σ g²: every local gradient's square, divided by the number of ranks with a copy of it.

        Summed over the `world` ranks of a pipeline stage (and over stages) it is Σ g² of the whole model.
        """
        by_copies: dict[int, list[Tensor]] = {}
        for bucket in self.buckets:
            for name, p in zip(bucket.names, bucket.parameters, strict=True):
                if p.grad is not None and name not in self.counted_elsewhere:
                    by_copies.setdefault(world // shard_count(p, self.splits.get(name)), []).append(local(p.grad))
        parts = [global_norm(found).double().square() / copies for copies, found in by_copies.items()]
        return torch.stack(parts).sum()

    @property
    def skips_nan(self) -> bool:
        """Whether a step with factor NaN changes no weight and no state, so that it can be launched before the host
        knows the loss."""
        return not self.settings.l1 and all(isinstance(bucket.updater, TorchUpdater) for bucket in self.buckets)

    @property
    def counts(self) -> list[list[int]]:
        """How often the weights of each bucket have been updated."""
        return [[*bucket.updater.counts] for bucket in self.buckets]

    @counts.setter
    def counts(self, counts: list[list[int]]) -> None:
        for bucket, own in zip(self.buckets, counts, strict=True):
            bucket.updater.counts = [*own]

    def device_numbers(self, device: torch.device) -> DeviceNumbers:
        """Per-step scalars in device memory for the updates of all buckets."""
        return DeviceNumbers(self.settings, [bucket.updater.weight_decay for bucket in self.buckets], device)

    @contextmanager
    def reading_numbers(self, numbers: DeviceNumbers) -> Iterator[None]:
        """Kernels launched inside the block read the scalars of their update from device memory."""
        for bucket in self.buckets:
            bucket.updater.device_numbers = numbers.of(bucket.updater.weight_decay)
        try:
            yield
        finally:
            for bucket in self.buckets:
                bucket.updater.device_numbers = None

    def uncount_step(self) -> None:
        """Take back the count of the last step, whose factor was NaN."""
        for bucket in self.buckets:
            assert isinstance(bucket.updater, TorchUpdater)
            bucket.updater.uncount()

    @torch.no_grad()
    def step(self, lr: float, gradient_factor: Tensor | None = None) -> None:
        """Update with gradients times `gradient_factor` (clipping and unscaling), then free them."""
        for bucket in self.buckets:
            self._update(bucket, lr, gradient_factor)
        if self.offloading is not None:
            self.offloading.link.flush_deferred()
            if self.keep_gradient_memory and not self.has_stepped:
                self.offloading.synchronize()
                self.drop_gradients()
        self.has_stepped = True

    def _update(self, bucket: Bucket, lr: float, factor: Tensor | None) -> None:
        cast = self.casts_gradients and bucket.updater.needs_gradients_in_weight_dtype
        gradients = [self._cast_gradient(*pair) if cast else _gradient(pair[0]) for pair in bucket.pairs]
        copies = [local(p) for p in bucket.parameters] if self.casts_gradients else None
        if self.settings.keep_zeros and bucket.decays:
            _keep_zeros(bucket.masters, gradients)
        bucket.updater.update(gradients, copies, lr, factor)
        if self.settings.l1 and bucket.decays:
            _shrink(bucket.masters, copies, by=lr * self.settings.l1)
        # DDP's buckets are zeroed once updates have read them; by the next forward pass DDP may have moved them.
        in_flight = self.keep_gradient_memory and isinstance(bucket.updater, StreamedUpdater)
        for parameter, master in bucket.pairs:
            if master is not parameter:
                master.grad = None
            if not cast and not in_flight:
                self._free_gradient(parameter)

    def _cast_gradient(self, parameter: Tensor, master: Tensor) -> Tensor | None:
        """The gradient in the master's dtype; the original is freed."""
        gradient = None if parameter.grad is None else local(parameter.grad).to(master.dtype)
        self._free_gradient(parameter)
        return gradient

    def drop_gradients(self) -> None:
        """Free the gradients of a skipped step."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                self._free_gradient(parameter)

    def _free_gradient(self, parameter: Tensor) -> None:
        # DDP makes new buckets when the second forward pass begins: gradients kept from the first step keep both alive.
        kept = self.keep_gradient_memory and self.has_stepped and id(parameter) not in self._not_replicated
        if kept and parameter.grad is not None:
            parameter.grad.zero_()
        else:
            parameter.grad = None

    def stream_weights(self, model: Decoder) -> None:
        """Wrap each layer's current forward so that offloaded weights are loaded before it."""
        if self.offloading is not None and self.offloading.stream is not None:
            self.offloading.stream.wrap(list(model.layers))

    def state(self) -> dict[str, Tensor]:
        """Every state tensor by `kind/parameter name`, masters included; DTensors where parameters are sharded."""
        if self.offloading is not None:
            self.offloading.synchronize()
        return dict(self._state_tensors())

    def _state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self.buckets:
            for index, (name, (parameter, master)) in enumerate(zip(bucket.names, bucket.pairs, strict=True)):
                yield f"step/{name}", bucket.updater.step(index)
                is_kept = self.has_masters or name in self.extra_parameters
                kinds = bucket.updater.states(index) | ({"master": master} if is_kept else {})
                for kind, tensor in kinds.items():
                    state = like_shard(tensor, parameter) if is_shard(parameter) else tensor
                    yield f"{kind}/{name}", as_dtensor(state, self.splits.get(name))
        if self.in_backward is not None:
            yield PREVIOUS_NORMS, self.in_backward.previous_norms
        if self.buffered is not None:
            for name, weight in self.buffered.model.versions.named_older():
                yield f"{OLDER_WEIGHTS}{name}", as_dtensor(weight, self.splits.get(name))

    def state_in(self, saved: Container[str]) -> dict[str, Tensor]:
        """The state tensors to load: all but optional ones that are not in `saved`."""
        return {name: tensor for name, tensor in self.state().items() if not is_optional(name) or name in saved}

    @torch.no_grad()
    def load_state(self, saved: Mapping[str, Tensor], source: str) -> None:
        """Load saved states; one that is missing, left over or of another shape or dtype is an error."""
        own = self.state_in(saved)
        if odd := sorted(name for name in own.keys() ^ saved.keys() if not is_optional(name)):
            raise UserError(
                f"{source} does not fit this run: optimizer state {odd[0]} is on one side only; {STATES_REMEDY}"
            )
        for name, tensor in own.items():
            stored = saved[name]
            if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
                raise UserError(
                    f"{source}: {name} is {stored.dtype} {list(stored.shape)}, "
                    f"this run needs {tensor.dtype} {list(tensor.shape)}; {STATES_REMEDY}"
                )
            copy_whole(tensor, stored)
        for bucket in self.buckets:
            for index, name in enumerate(bucket.names):
                bucket.updater.set_step(index, saved[f"step/{name}"])


def is_optional(name: str) -> bool:
    """Whether runs of some layouts and levers lack this state."""
    return name == PREVIOUS_NORMS or name.startswith(OLDER_WEIGHTS)


def _gradient(parameter: Tensor) -> Tensor | None:
    """The gradient that backward left; of a sharded parameter, the local shard."""
    return None if parameter.grad is None else local(parameter.grad)


def _keep_zeros(weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Zero the gradients of weights that are zero: as their moments were always zero too, pruned weights stay zero."""
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            gradient.masked_fill_(weight == 0, 0)


def _shrink(weights: Sequence[Tensor], copies: Sequence[Tensor] | None, *, by: float) -> None:
    """The proximal step of `by` · Σ |w|: shrink weights towards zero, never past it."""
    for index, weight in enumerate(weights):
        torch.ops.aten.softshrink.out(weight, by, out=weight)
        if copies is not None:
            copies[index].copy_(weight)


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices only, not to norms, biases, learned positions and learned scales.

    Biases of experts are stacked, a row for each, and so are known by their names.
    """
    return parameter.ndim >= 2 and not name.startswith(("positions.", SCALE_PREFIX)) and not name.endswith("bias")


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """√Σ g² over all gradients, in float32 whatever their dtype."""
    return gradient_norm(list(gradients))


def _split(named: Named, bucket_bytes: int | None) -> Iterator[Named]:
    """Consecutive parameters grouped to at most `bucket_bytes` of float32 gradients (a single one may exceed it)."""
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
