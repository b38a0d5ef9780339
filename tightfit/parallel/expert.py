"""Expert parallelism: data ranks hold different experts, and tokens travel to them and back (Lepikhin et al. 2020).

An expert rank holds count / ranks experts of every routed layer; everything else is as data parallelism has it. Rows (a
token and one of its experts, kernels/routed_mlp.py) are sorted by expert, so those for one rank are consecutive:

| | forward | backward |
|---|---|---|
| how many | all-to-all of the number of rows of each expert, read by the host | – |
| dispatch | all-to-all of rows [N · k, H] and their weights | their gradients come back |
| experts | one grouped product over the rows of all ranks | as on one rank |
| return | all-to-all of results, added up per token | all-to-all of the results' gradients |

Dropless unless there is a capacity: loads may be uneven, an expert or a whole rank may get nothing, and one may get
everything; a rank's memory follows what it receives. A capacity is of each rank's own tokens, so an expert gets at most
ranks times that. Weights travel with the rows, so that results need not be kept for their gradient. The shared
expert is computed while rows travel, and its backward while their gradients do: `_Depart` starts a transfer and
`_Arrive` waits for it, and in backward the other way round, with the shared expert's nodes between them.

What a rank keeps more than one rank alone does: the rows it received, k · tokens · H in balance. What it sends in a
layer, in elements: 2 k · tokens · H · (ranks − 1) / ranks forward, and as many backward.

Gradients of experts are summed over the data ranks that hold the same ones (`expert_data`), by FSDP2 or, with
`zero: 0`, by `sum_expert_gradients` once a step. With tensor parallelism each tensor rank sends the rows to the ranks
that hold the same columns. Where there are context ranks, these and data ranks are expert ranks together. Limit: the
host waits for the counts of every layer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from tightfit.collectives.shards import ParameterSplit, is_shard, remember_splits, splits_of
from tightfit.kernels.gather_rows import gather_rows
from tightfit.kernels.recomputation import is_result_wanted, placeholder
from tightfit.kernels.routed_mlp import Routing, by_row, combine, route
from tightfit.kernels.triton_support import Impl
from tightfit.models.decoder import Decoder
from tightfit.models.mlp import ExpertWeights
from tightfit.parallel.mesh import ExpertAxes, expert_axes

AXES = "expert_axes"
"""Attribute of a decoder whose experts are split: the meshes of that."""


def split_experts(model: Decoder, mesh: DeviceMesh) -> None:
    """Cut the experts of `model` to this rank's, in place, after tensor parallelism; it may be on the meta device."""
    axes = expert_axes(mesh)
    assert axes is not None
    splits = dict(splits_of(model))
    for path, experts in _experts(model):
        for leaf, whole in list(experts.named_parameters()):
            split = _split(axes, splits.get(f"{path}.{leaf}"), len(whole))
            with torch.no_grad():
                shard = whole.detach().narrow(0, *_expert_cut(split).bounds()).clone()
            setattr(experts, leaf, nn.Parameter(shard, requires_grad=whole.requires_grad))
            splits[f"{path}.{leaf}"] = split
        experts.forward = partial(_forward, experts, axes.expert.get_group())  # type: ignore[method-assign]
    remember_splits(model, splits)
    vars(model)[AXES] = axes


def _experts(model: nn.Module) -> Iterator[tuple[str, ExpertWeights]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, ExpertWeights))


def _split(axes: ExpertAxes, tensor: ParameterSplit | None, count: int) -> ParameterSplit:
    """How one parameter of stacked experts is split, which tensor parallelism may have split already."""
    if tensor is None:
        return ParameterSplit(mesh=axes.expert, grid=axes.grid, dim=0, size=count)
    outer = ParameterSplit(mesh=axes.expert, grid=axes.cuts, dim=0, size=count)
    return replace(tensor, grid=axes.grid, outer=outer)


def _expert_cut(split: ParameterSplit) -> ParameterSplit:
    return split if split.outer is None else split.outer


def expert_sharding(model: nn.Module) -> DeviceMesh | None:
    """FSDP2's axes of the experts of `model`; None where they are sharded as everything else is."""
    axes: ExpertAxes | None = vars(model).get(AXES)
    return None if axes is None else axes.sharding


def share_expert_axes(model: nn.Module, stage: nn.Module) -> None:
    """Let a pipeline stage of `model` know how experts are split."""
    if AXES in vars(model):
        vars(stage)[AXES] = vars(model)[AXES]


@torch.no_grad()
def sum_expert_gradients(model: nn.Module) -> None:
    """With `zero: 0`, all-reduce experts' gradients over the ranks that hold the same. Once a step, after backward."""
    mesh = expert_sharding(model)
    if mesh is None or mesh.size() == 1:
        return
    gradients = [p.grad for _, experts in _experts(model) for p in experts.parameters() if p.grad is not None]
    if any(is_shard(gradient) for gradient in gradients):
        return  # FSDP2 has summed them
    for work in [dist.all_reduce(gradient, group=mesh.get_group(), async_op=True) for gradient in gradients]:
        assert work is not None
        work.wait()


def expert_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters that only some data ranks hold."""
    if expert_sharding(model) is None:
        return []
    return [f"{path}.{leaf}" for path, experts in _experts(model) for leaf, _ in experts.named_parameters()]


def _forward(
    experts: ExpertWeights,
    group: dist.ProcessGroup,
    tokens: Tensor,
    weights: Tensor,
    routing: Routing,
    beside: Callable[[], Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """In place of `ExpertWeights.forward`: this rank's tokens through the experts of all ranks."""
    trip, local = plan_trip(routing, group, experts.impl)
    if routing.drops:  # fewer rows than there is room for
        routing = routing._replace(tokens=routing.tokens[: sum(trip.sent)])
    leaving = _Depart.apply(tokens, by_row(weights, routing), routing.tokens, routing.rows, trip)
    other = None if beside is None else beside()
    rows, row_weights = _Arrive.apply(*leaving, trip)
    made = experts.compute(rows, row_weights[:, None], local)
    return _Return.apply(made, routing.tokens, routing.rows, trip), other


@dataclass
class Trip:
    """Rows on their way: how many go to and come from each expert rank, and what is in flight."""

    group: dist.ProcessGroup
    sent: list[int]
    """Rows for each rank, in its order."""
    received: list[int]
    """Rows from each rank."""
    impl: Impl = "auto"
    """The implementation that adds up a token's rows."""
    pending: list[tuple[Any, Tensor, Tensor]] = field(default_factory=list)
    """Each transfer's work, and the tensors it reads and writes."""

    def start(self, x: Tensor, *, back: bool = False) -> Tensor:
        """Begin to send rows x to where they go, or with `back` to where they came from; `wait` before reading."""
        leaving, arriving = (self.received, self.sent) if back else (self.sent, self.received)
        out = x.new_empty(sum(arriving), *x.shape[1:])
        if _is_fake(self.group):
            self.pending.append((None, x, out.copy_(x)))
            return out
        work = dist.all_to_all_single(out, x.contiguous(), arriving, leaving, group=self.group, async_op=True)
        self.pending.append((work, x, out))
        return out

    def wait(self) -> list[Tensor]:
        """What has arrived, of all transfers begun."""
        arrived = []
        for work, _, out in self.pending:
            if work is not None:
                work.wait()
            arrived.append(out)
        self.pending = []
        return arrived


def plan_trip(routing: Routing, group: dist.ProcessGroup, impl: Impl = "auto") -> tuple[Trip, Routing]:
    """Tell every rank how many rows it gets for each of its experts, and wait until the host knows.

    Also the routing of received rows to this rank's experts.
    """
    ranks = group.size()
    sent = routing.offsets.diff(prepend=routing.offsets.new_zeros(1)).view(ranks, -1)  # [ranks, their experts]
    received = torch.empty_like(sent)
    if _is_fake(group):
        received.copy_(sent)
    else:
        dist.all_to_all_single(received, sent.contiguous(), group=group)
    rows = len(routing.tokens)
    if isinstance(sent, FakeTensor):  # nobody knows them: in balance
        to_ranks = from_ranks = [rows * (rank + 1) // ranks - rows * rank // ranks for rank in range(ranks)]
    else:
        to_ranks, from_ranks = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    local = torch.arange(sent.shape[1], device=sent.device).repeat(ranks)
    experts = local.repeat_interleave(received.flatten(), output_size=sum(from_ranks))
    return Trip(group, to_ranks, from_ranks, impl), route(experts[:, None], sent.shape[1])


def _is_fake(group: dist.ProcessGroup) -> bool:
    """Whether nobody answers: one rank that pretends, to be measured. Others then send what this rank sends them."""
    return bool(dist.get_backend(group) == "fake")


class _Depart(torch.autograd.Function):
    """Start to send tokens' copies and weights to their experts; backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by_row: Tensor, tokens: Tensor, rows: Tensor, trip: Trip) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        ctx.trip = trip
        return trip.start(gather_rows(x, tokens, impl=trip.impl)), trip.start(by_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        d_copies, d_by_row = ctx.trip.wait()
        return combine(d_copies, None, None, rows, impl=ctx.trip.impl), d_by_row, None, None, None


class _Arrive(torch.autograd.Function):
    """Wait for rows and weights; backward starts to send their gradients home."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, by_row: Tensor, trip: Trip) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        trip.wait()
        return rows.view_as(rows), by_row.view_as(by_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_by_row: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.trip.start(d_rows, back=True)
        ctx.trip.start(d_by_row, back=True)
        return d_rows, d_by_row, None  # of the shape that autograd expects; `_Depart` takes what has arrived


class _Return(torch.autograd.Function):
    """Send experts' results home and add up those of each token."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, tokens: Tensor, rows: Tensor, trip: Trip) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.trip = trip
        if not is_result_wanted():
            return placeholder(made, made.shape[-1], rows=len(rows))
        trip.start(made, back=True)
        return combine(trip.wait()[0], None, None, rows, impl=trip.impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (tokens,) = ctx.saved_tensors
        ctx.trip.start(gather_rows(dy, tokens, impl=ctx.trip.impl))
        return ctx.trip.wait()[0], None, None, None
