"""Expert parallelism: data ranks hold different experts, and tokens travel to them and back (Lepikhin et al. 2020).

An expert rank holds count / ranks experts of every routed layer; all other weights are data-parallel as usual. Rows (a
token and one of its experts, kernels/experts/routed_mlp.py) are sorted by expert, so the rows for one rank are
consecutive:

| | forward | backward |
|---|---|---|
| how many | all-to-all of the number of rows of each expert, read by the host | – |
| dispatch | all-to-all of rows [N · k, H] and their weights | their gradients come back |
| experts | one grouped product over the rows of all ranks | as on one rank |
| return | all-to-all of results, added up per token | all-to-all of the results' gradients |

Dropless unless there is a capacity: loads may be uneven, an expert or a whole rank may get nothing, and one may get
everything; a rank's memory grows with the rows it receives. A capacity limits the rows of each sending rank, so an
expert gets at most ranks times that. Routing weights travel with the rows, so that experts' results need not be saved
for the weights' gradient. The shared expert is computed while rows travel, and its backward while their gradients do:
`_Depart` starts a transfer and `_Arrive` waits for it, and in backward the other way round, with the shared expert's
nodes between them.

What a rank saves for backward beyond what a single rank saves: the rows it received, k · tokens · H elements if loads
are balanced. Elements that it sends per layer: 2 k · tokens · H · (ranks − 1) / ranks forward, and as many backward.

Gradients of experts are summed over the data ranks that hold the same ones (`expert_data`), by FSDP2 or, with
`zero: 0`, by `sum_expert_gradients` once a step. With tensor parallelism each tensor rank sends the rows to the ranks
that hold the same columns. Where there are context ranks, expert ranks are data and context ranks together. Limit: the
host waits for the row counts of every layer.
"""

from collections.abc import Iterator
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
from tightfit.kernels.experts.gather_rows import gather_rows
from tightfit.kernels.experts.routed_mlp import Routing, by_row, combine, route
from tightfit.kernels.recomputation import is_result_wanted, placeholder
from tightfit.kernels.triton_support import Impl
from tightfit.models.decoder import Decoder
from tightfit.models.layers.mlp import ExpertWeights, SharedExpert
from tightfit.parallel.mesh import ExpertAxes, expert_axes

AXES = "expert_axes"
"""Name of the attribute that holds the ExpertAxes of a decoder whose experts are split."""


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
    """The split of one parameter of stacked experts; `tensor` is its split by tensor parallelism, if any."""
    if tensor is None:
        return ParameterSplit(mesh=axes.expert, grid=axes.grid, dim=0, size=count)
    outer = ParameterSplit(mesh=axes.expert, grid=axes.cuts, dim=0, size=count)
    return replace(tensor, grid=axes.grid, outer=outer)


def _expert_cut(split: ParameterSplit) -> ParameterSplit:
    return split if split.outer is None else split.outer


def expert_sharding(model: nn.Module) -> DeviceMesh | None:
    """The mesh over which FSDP2 shards the experts of `model`; None where it shards them like all other weights."""
    axes: ExpertAxes | None = vars(model).get(AXES)
    return None if axes is None else axes.sharding


def share_expert_axes(model: nn.Module, stage: nn.Module) -> None:
    """Let a pipeline stage of `model` know how experts are split."""
    if AXES in vars(model):
        vars(stage)[AXES] = vars(model)[AXES]


@torch.no_grad()
def sum_expert_gradients(model: nn.Module) -> None:
    """With `zero: 0`, all-reduce experts' gradients over ranks with the same experts. Once a step, after backward."""
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
    shared_expert: SharedExpert,
) -> tuple[Tensor, Tensor | None]:
    """In place of `ExpertWeights.forward`: this rank's tokens through the experts of all ranks."""
    exchange, local = plan_exchange(routing, group, experts.impl)
    if routing.drops:  # the buffer has room for more rows than are sent
        routing = routing._replace(tokens=routing.tokens[: sum(exchange.sent)])
    leaving = _Depart.apply(tokens, by_row(weights, routing), routing.tokens, routing.rows, exchange)
    other = None if shared_expert is None else shared_expert()
    rows, row_weights = _Arrive.apply(*leaving, exchange)
    made = experts.compute(rows, row_weights[:, None], local)
    return _Return.apply(made, routing.tokens, routing.rows, exchange), other


@dataclass
class RowExchange:
    """One exchange of rows between expert ranks: how many go to and come from each, and the transfers in flight."""

    group: dist.ProcessGroup
    sent: list[int]
    """Rows that this rank sends to each rank of `group`."""
    received: list[int]
    """Rows that this rank receives from each rank of `group`."""
    impl: Impl = "auto"
    """The implementation that adds up a token's rows."""
    pending: list[tuple[Any, Tensor, Tensor]] = field(default_factory=list)
    """Of each transfer in flight: its work, the tensor it reads and the tensor it writes."""

    def start(self, x: Tensor, *, back: bool = False) -> Tensor:
        """Start to send rows x to their experts' ranks, or with `back` to where they came from. Returns the buffer of
        the rows that arrive; `wait` before reading it."""
        leaving, arriving = (self.received, self.sent) if back else (self.sent, self.received)
        out = x.new_empty(sum(arriving), *x.shape[1:])
        if _is_fake(self.group):
            self.pending.append((None, x, out.copy_(x)))
            return out
        work = dist.all_to_all_single(out, x.contiguous(), arriving, leaving, group=self.group, async_op=True)
        self.pending.append((work, x, out))
        return out

    def wait(self) -> list[Tensor]:
        """Wait for all transfers in flight; returns the rows that arrived, in the order of the `start` calls."""
        arrived = []
        for work, _, out in self.pending:
            if work is not None:
                work.wait()
            arrived.append(out)
        self.pending = []
        return arrived


def plan_exchange(routing: Routing, group: dist.ProcessGroup, impl: Impl = "auto") -> tuple[RowExchange, Routing]:
    """Exchange the number of rows per expert between ranks, and wait until the host knows them.

    Returns the exchange, and the routing of the received rows to this rank's experts.
    """
    ranks = group.size()
    sent = routing.offsets.diff(prepend=routing.offsets.new_zeros(1)).view(ranks, -1)  # [ranks, experts of each]
    received = torch.empty_like(sent)
    if _is_fake(group):
        received.copy_(sent)
    else:
        dist.all_to_all_single(received, sent.contiguous(), group=group)
    rows = len(routing.tokens)
    if isinstance(sent, FakeTensor):  # which has no values: assume balanced loads
        to_ranks = from_ranks = [rows * (rank + 1) // ranks - rows * rank // ranks for rank in range(ranks)]
    else:
        to_ranks, from_ranks = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    local = torch.arange(sent.shape[1], device=sent.device).repeat(ranks)
    experts = local.repeat_interleave(received.flatten(), output_size=sum(from_ranks))
    return RowExchange(group, to_ranks, from_ranks, impl), route(experts[:, None], sent.shape[1])


def _is_fake(group: dist.ProcessGroup) -> bool:
    """Whether `group` is torch's fake backend: one process, for measurements, that receives what it sends."""
    return bool(dist.get_backend(group) == "fake")


class _Depart(torch.autograd.Function):
    """Start to send tokens' copies and weights to their experts; backward waits for their gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, by_row: Tensor, tokens: Tensor, rows: Tensor, exchange: RowExchange
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        ctx.exchange = exchange
        return exchange.start(gather_rows(x, tokens, impl=exchange.impl)), exchange.start(by_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        d_copies, d_by_row = ctx.exchange.wait()
        return combine(d_copies, None, None, rows, impl=ctx.exchange.impl), d_by_row, None, None, None


class _Arrive(torch.autograd.Function):
    """Wait for rows and weights; backward starts to send their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, by_row: Tensor, exchange: RowExchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        exchange.wait()
        return rows.view_as(rows), by_row.view_as(by_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_by_row: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.exchange.start(d_rows, back=True)
        ctx.exchange.start(d_by_row, back=True)
        return d_rows, d_by_row, None  # for autograd's shape check; `_Depart` returns the gradients that arrive


class _Return(torch.autograd.Function):
    """Send experts' results back and add up those of each token."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, tokens: Tensor, rows: Tensor, exchange: RowExchange) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.exchange = exchange
        if not is_result_wanted():
            return placeholder(made, made.shape[-1], rows=len(rows))
        exchange.start(made, back=True)
        return combine(exchange.wait()[0], None, None, rows, impl=exchange.impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (tokens,) = ctx.saved_tensors
        ctx.exchange.start(gather_rows(dy, tokens, impl=ctx.exchange.impl))
        return ctx.exchange.wait()[0], None, None, None
