"""Tensor parallelism (Megatron-style): ranks split every matrix product of a layer (Shoeybi et al. 2019).

A block is attention or an MLP. Projections into it (q, k, v; gate, up; of every expert) are column-parallel, those out
of it (o, down) row-parallel, so a block needs one collective at its start and one at its end, and their conjugates in
backward. Embedding and output projection are split by vocabulary. The decoder is unchanged: its parameters become plain
tensors of this rank's shard, and hooks around the blocks run the collectives (conjugate.py). DTensors would compute the
same, but cost a dispatch per operation and keep fused kernels and DDP out; they only describe parameters to state dicts
and optimizer states (shards.py).

| | before a block | after a block | norms and residual stream | per layer, forward + backward |
|---|---|---|---|---|
| plain | copy | all-reduce | whole, on every rank | 2 + 2 all-reduces |
| sequence-parallel | all-gather | reduce-scatter | tokens / t each | as many bytes, and 2 all-gathers |

The two more all-gathers bring back the blocks' gathered inputs, which are freed after forward; they overlap with the
block after. Partial gradients, which must be summed over tensor ranks: q_norm, k_norm and the router always; under
sequence parallelism also the other norms and the biases of o and down. `sum_partial_gradients` all-reduces them once a
step. Biases of o and down are added once, after the sum over ranks; those of experts' down, which are weighed by token,
by the first rank alone. Each rank routes all tokens and computes its columns of every expert, and has the attention
sinks of its heads. With fewer key/value heads than ranks, the ranks that use a head compute a part of it each.
Refused: sizes that cannot be divided, and losses that need whole rows of logits. Replicated weights stay equal because
their gradients are equal, bit for bit.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tightfit.collectives.conjugate import (
    FreedInput,
    all_gather,
    all_gather_columns,
    all_reduce,
    copy_to_ranks,
    divide_gradient,
    is_recomputing,
    reduce_scatter,
    split_tokens,
)
from tightfit.collectives.shards import ParameterSplit, local, remember_splits, splits_of
from tightfit.errors import UserError
from tightfit.jobs.rules.shapes import uneven_share
from tightfit.kernels.loss.vocab_parallel import VocabularyRows, embed_own_rows
from tightfit.levers.tiling import EXCHANGE
from tightfit.models.decoder import Attention, Decoder, ForwardContext
from tightfit.models.layers.mlp import Mlp, RoutedMlp
from tightfit.parallel.mesh import TIMEOUT, tensor_axes

CUTS = (
    (r"^(embed|head)\.weight$", 0),
    (r"\.attention\.sinks$", 0),
    (r"\.experts\.(gate|up)(_bias)?$", 1),
    (r"\.experts\.down$", 2),
    (r"\.(q|k|v|gate|up)\.(weight|bias)$", 0),
    (r"\.(o|down)\.weight$", 1),
)
"""The dimension that each parameter is split along; others are replicated."""
ALWAYS_PARTIAL = r"\.(q_norm|k_norm|router|shared_gate)\.|\.experts\.down_bias$"
LARGE_GRADIENT = 2**20
"""Elements; a larger gradient gains nothing from sharing a message with others."""
PARTIAL_BY_TOKENS = r"norm\.|\.(o|down)\.bias$"


def tensor_parallel(model: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split `model` for this rank of the mesh's tensor axis, in place; it may be on the meta device."""
    axis, grid = tensor_axes(mesh)
    splits = {
        name: _split(name, p, axis, grid, sequence_parallel=sequence_parallel) for name, p in model.named_parameters()
    }
    for name, split in splits.items():
        if split.dim is not None:
            _cut(model, name, split)
    if model.spec.tied and "embed.weight" in splits:
        model.head.weight = model.embed.weight
        splits["head.weight"] = splits["embed.weight"]
    remember_splits(model, splits)
    exchange = SequenceExchange(axis.get_group()) if sequence_parallel else Exchange(axis.get_group())
    first, count = ParameterSplit(mesh=axis, grid=grid, dim=0, size=model.spec.vocab_size).bounds()
    _hook(model, exchange, VocabularyRows(model.spec.vocab_size, first, count, exchange.group.group_name))
    _gather_kv_heads(model, axis.size())


def _split(
    name: str, p: nn.Parameter, axis: DeviceMesh, grid: DeviceMesh, *, sequence_parallel: bool
) -> ParameterSplit:
    dim = next((dim for pattern, dim in CUTS if re.search(pattern, name)), None)
    by_tokens = sequence_parallel and re.search(PARTIAL_BY_TOKENS, name)
    partial_gradient = bool(re.search(ALWAYS_PARTIAL, name) or by_tokens)
    size = 0 if dim is None else p.shape[dim]
    return ParameterSplit(mesh=axis, grid=grid, dim=dim, size=size, partial_gradient=partial_gradient)


def _cut(model: nn.Module, name: str, split: ParameterSplit) -> None:
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    whole = getattr(owner, leaf)
    assert split.dim is not None
    with torch.no_grad():
        shard = whole.detach().narrow(split.dim, *split.bounds()).clone(memory_format=torch.contiguous_format)
    setattr(owner, leaf, nn.Parameter(shard, requires_grad=whole.requires_grad))


@dataclass
class Exchange:
    """The collectives around blocks, with the residual stream replicated on all tensor ranks."""

    group: dist.ProcessGroup

    def enter(self, x: Tensor) -> Tensor:
        """Residual stream → a block's input."""
        return copy_to_ranks(x, self.group)

    def leave(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """A block's partial output → what is added to the residual stream."""
        y = all_reduce(y, self.group)
        return y if bias is None else y + bias

    def enter_tile(self, x: Tensor, length: int) -> Tensor:
        """`enter` of a tile of rows of `length` tokens, whose input is not saved for backward (levers/tiling.py)."""
        return self.enter(x)

    def leave_tile(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """`leave` of a tile."""
        return self.leave(y, bias)

    def embed(self, x: Tensor, *, positions: bool) -> Tensor:
        """Embeddings of this rank's vocabulary rows (zero for other tokens) → embeddings."""
        return all_reduce(x, self.group)

    def begin(self, x: Tensor, *, positions: bool) -> Tensor:
        """Embeddings → residual stream before the first layer."""
        return x

    def end(self, x: Tensor) -> Tensor:
        """Final norm's output → hidden states for the loss, whose gradients are partial."""
        return copy_to_ranks(x, self.group)


@dataclass
class SequenceExchange(Exchange):
    """The collectives of sequence parallelism: the residual stream is split by tokens."""

    length: int = 0
    """Tokens of a row, from the attention mask."""
    shard: Tensor | None = None
    gathered: Tensor | None = None
    latest: FreedInput | None = None
    """Input of the last block so far in this forward pass."""

    def start(self) -> None:
        """Called before the first layer of a forward pass."""
        if not is_recomputing():
            self.latest = None

    def enter(self, x: Tensor) -> Tensor:
        """This rank's tokens → all tokens; remembered until `leave` frees them."""
        out = all_gather(x, self.group)
        self.shard, self.gathered = x.detach(), out.detach()
        return out

    def leave(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """A block's partial output → this rank's tokens of the sum."""
        shard, gathered = self.shard, self.gathered
        self.shard = self.gathered = None
        assert shard is not None, "leave without enter"
        assert gathered is not None
        freed = FreedInput(shard, gathered, None if is_recomputing() else self.latest)
        if not is_recomputing():
            self.latest = freed
        out = reduce_scatter(y, self.group, shard, gathered, freed)
        return out if bias is None else out + bias

    def enter_tile(self, x: Tensor, length: int) -> Tensor:
        """A tile of every rank's tokens, [ranks, tile, H]."""
        self.length = length
        return all_gather(x, self.group).view(self.group.size(), -1, x.shape[-1])

    def leave_tile(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """[ranks, tile, H] → this rank's tokens of the sum, [1, tile, H]."""
        out = reduce_scatter(y, self.group)
        return out if bias is None else out + bias

    def embed(self, x: Tensor, *, positions: bool) -> Tensor:
        """Partial embeddings, which `begin` reduce-scatters; summed here where learned positions will be added."""
        return all_reduce(x, self.group) if positions else x

    def begin(self, x: Tensor, *, positions: bool) -> Tensor:
        """Embeddings → this rank's tokens of the residual stream."""
        tokens_per_rank(x.shape[0], x.shape[1], self.group.size())
        return split_tokens(x, self.group) if positions else reduce_scatter(x, self.group)

    def end(self, x: Tensor) -> Tensor:
        """This rank's tokens → all tokens [B, T, H]."""
        return all_gather(x, self.group).view(-1, self.length, x.shape[-1])


def tokens_per_rank(rows: int, length: int, ranks: int) -> int:
    """Tokens of the residual stream on each tensor rank under sequence parallelism."""
    if sentence := uneven_share(rows, length, ranks):
        raise UserError(sentence)
    return rows * length // ranks


def _hook(model: Decoder, exchange: Exchange, rows: VocabularyRows) -> None:
    """Register the collectives on the modules of `model`, which in a pipeline has this rank's layers only."""
    positions = model.spec.rope is None
    model.impl = replace(model.impl, vocabulary=rows)
    if model.embed is not None:
        model.embed.forward = partial(_embed, model.embed, rows, exchange, positions)  # type: ignore[method-assign]
    if isinstance(exchange, SequenceExchange):
        next(iter(model.layers)).register_forward_pre_hook(lambda _, args: exchange.start())
    if (first := model.layers._modules.get("0")) is not None:
        first.register_forward_pre_hook(lambda _, args: (exchange.begin(args[0], positions=positions), *args[1:]))
    if model.norm is not None:
        model.norm.register_forward_hook(lambda _, args, output: exchange.end(output))
    layers: list[Any] = list(model.layers)
    for layer in layers:
        _hook_layer(layer, exchange)


def _hook_layer(layer: Any, exchange: Exchange) -> None:
    attention, mlp = layer.attention, layer.mlp
    vars(attention)[EXCHANGE] = exchange  # for tiles, which call its projections and not the module
    attention.register_forward_pre_hook(_enter_attention(exchange))
    _leave_out_bias(attention.o)
    attention.register_forward_hook(partial(_leave, exchange, attention.o))
    mlp.register_forward_pre_hook(lambda _, args: exchange.enter(args[0]))
    down = mlp.down if isinstance(mlp, Mlp) else None
    if down is not None:
        _leave_out_bias(down)
    mlp.register_forward_hook(partial(_leave, exchange, down))
    if isinstance(mlp, RoutedMlp):
        mlp.experts.adds_down_bias = exchange.group.rank() == 0


def _gather_kv_heads(model: Decoder, ranks: int) -> None:
    """With fewer key/value heads than ranks, the ranks that use a head compute a part each and all-gather it."""
    ranks_per_head = ranks // model.spec.kv_heads
    if ranks_per_head <= 1:
        return
    group, _ = dist.new_subgroups(ranks_per_head, timeout=TIMEOUT)  # neighbours, as tensor is the innermost axis
    layers: list[Any] = list(model.layers)
    for layer in layers:
        for projection in (layer.attention.k, layer.attention.v):
            projection.register_forward_hook(lambda _, args, output: all_gather_columns(output, group))


def _embed(embed: nn.Embedding, rows: VocabularyRows, exchange: Exchange, positions: bool, tokens: Tensor) -> Tensor:
    return exchange.embed(embed_own_rows(tokens, embed.weight, rows), positions=positions)


def _enter_attention(exchange: Exchange) -> Callable[[Attention, tuple[Tensor, ForwardContext]], tuple[Any, ...]]:
    """The pre-hook of attention, which needs [B, T, H]; all-gathered tokens are [1, B · T, H]."""

    def enter(_: Attention, args: tuple[Tensor, ForwardContext]) -> tuple[Tensor, ForwardContext]:
        x, ctx = args
        if not isinstance(exchange, SequenceExchange):
            return exchange.enter(x), ctx
        exchange.length = ctx.mask.queries
        return exchange.enter(x).view(-1, exchange.length, x.shape[-1]), ctx

    return enter


def _leave_out_bias(out: nn.Linear) -> None:
    """Make a row-parallel projection skip its bias, which is added once, after the sum over ranks."""
    if out.bias is not None:
        out.forward = lambda input: F.linear(input, out.weight)  # type: ignore[method-assign]


def _leave(exchange: Exchange, out: nn.Linear | None, _: nn.Module, args: Any, output: Any) -> Any:
    """The forward hook of a block; an MLP returns (output, auxiliary loss)."""
    bias = None if out is None else out.bias
    if not isinstance(output, tuple):
        return exchange.leave(output, bias)
    y, auxiliary = output
    auxiliary = None if auxiliary is None else divide_gradient(auxiliary, exchange.group)
    return exchange.leave(y, bias), auxiliary


@torch.no_grad()
def sum_partial_gradients(model: nn.Module) -> None:
    """All-reduce each partial gradient over the axes it is partial over. Once a step, after the last backward."""
    by_axis: dict[DeviceMesh, list[Tensor]] = {}
    for axis, gradient in _partial_gradients(model):
        by_axis.setdefault(axis, []).append(gradient)
    for axis, gradients in by_axis.items():
        for bucket in _buckets(gradients):
            _sum_together(bucket, axis.get_group())


def _sum_together(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    if len(gradients) == 1 and gradients[0].is_contiguous():
        dist.all_reduce(gradients[0], group=group)
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    summed = flat.split([gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, summed, strict=True):
        gradient.copy_(total.view_as(gradient))


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Buckets of one dtype each, copied into one message; a large gradient is a bucket alone, sent without a copy."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel() > LARGE_GRADIENT:
            yield [gradient]
        else:
            small.setdefault(gradient.dtype, []).append(gradient)
    yield from small.values()


def _partial_gradients(model: nn.Module) -> Iterator[tuple[DeviceMesh, Tensor]]:
    """Every gradient with each axis that it is partial over."""
    splits = splits_of(model)
    for name, p in model.named_parameters() if splits else ():
        if p.grad is not None and name in splits:
            yield from ((axis, local(p.grad)) for axis in splits[name].summed_over)
