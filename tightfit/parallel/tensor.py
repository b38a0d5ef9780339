"""Tensor parallelism in one dimension: ranks split every matrix product of a layer (Shoeybi et al. 2019).

The projections into a block (q, k, v; gate, up; every expert's) are cut by their outputs, the one out of it (o, down)
by its inputs, so a block needs one collective where it begins and one where it ends, and its conjugates in backward.
Embedding and output projection are cut by the vocabulary. The decoder is unchanged: its parameters become plain tensors
of this rank's part and hooks around its blocks say what ranks exchange (conjugate.py). DTensors would compute the same;
they cost a dispatch per operation and keep fused kernels and DDP out, so they only describe parameters from outside
(shards.py: the state dict, the optimizer's states).

| | before a block | after a block | norms and residual stream | per layer, forward + backward |
|---|---|---|---|---|
| plain | copy | all-reduce | whole, on every rank | 2 + 2 all-reduces |
| sequence-parallel | all-gather | reduce-scatter | tokens / t each | as many bytes, and 2 all-gathers |

The two more all-gathers bring back what a block's projections took in, which is let go of after forward rather than
kept; they run while the block after it computes. Whose gradients are parts of a sum over tensor ranks: norms of queries
and keys and the router always; under sequence parallelism also the other norms and the biases added after a block.
`sum_partial_gradients` adds them up, once a step. Biases of o and down are added after the sum, once. Each rank routes
all tokens and computes its columns of every expert. Where there are fewer key heads than ranks, those that use a head
compute a part of it each. Refused with a sentence: what cannot be divided, and what needs whole rows of logits. Weights
that all ranks have stay equal because their gradients are, bit for bit.
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
    Taken,
    copied,
    gathered,
    gradient_shared,
    joined_columns,
    own_part,
    recomputing,
    scattered,
    summed,
)
from tightfit.collectives.shards import Split, local, remember_splits, splits_of
from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.kernels.adamw8bit import WIDTH as EIGHT_BIT_BLOCK
from tightfit.kernels.vocab_parallel import VocabularyRows, embedded_here
from tightfit.models.decoder import Attention, Decoder, ForwardContext
from tightfit.models.mlp import Mlp
from tightfit.models.spec import ModelSpec
from tightfit.parallel.mesh import TIMEOUT, tensor_axes
from tightfit.plan.dividing import indivisible, widths

CUTS = (
    (r"^(embed|head)\.weight$", 0),
    (r"\.experts\.(gate|up)$", 1),
    (r"\.experts\.down$", 2),
    (r"\.(q|k|v|gate|up)\.(weight|bias)$", 0),
    (r"\.(o|down)\.weight$", 1),
)
"""Which dimension of a parameter is cut; of others every rank has all."""
ALWAYS_PARTIAL = r"\.(q_norm|k_norm|router|shared_gate)\."
PARTIAL_BY_TOKENS = r"norm\.|\.(o|down)\.bias$"


def tensor_parallel(model: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cut `model` for this rank of the mesh's tensor axis, in place; it may be on the meta device."""
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
    first, count = Split(axis, grid, 0, model.spec.vocab_size).bounds()
    _hook(model, exchange, VocabularyRows(model.spec.vocab_size, first, count, exchange.group.group_name))
    _share_key_heads(model, axis.size())


def _split(name: str, p: nn.Parameter, axis: DeviceMesh, grid: DeviceMesh, *, sequence_parallel: bool) -> Split:
    dim = next((dim for pattern, dim in CUTS if re.search(pattern, name)), None)
    by_tokens = sequence_parallel and re.search(PARTIAL_BY_TOKENS, name)
    summed = bool(re.search(ALWAYS_PARTIAL, name) or by_tokens)
    return Split(axis, grid, dim, 0 if dim is None else p.shape[dim], summed)


def _cut(model: nn.Module, name: str, split: Split) -> None:
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    whole = getattr(owner, leaf)
    assert split.dim is not None
    with torch.no_grad():
        part = whole.detach().narrow(split.dim, *split.bounds()).clone(memory_format=torch.contiguous_format)
    setattr(owner, leaf, nn.Parameter(part, requires_grad=whole.requires_grad))


@dataclass
class Exchange:
    """What tensor ranks say around blocks, with the residual stream whole on each of them."""

    group: dist.ProcessGroup

    def enter(self, x: Tensor) -> Tensor:
        """A block's input from the residual stream."""
        return copied(x, self.group)

    def leave(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """What a block adds to the residual stream, from each rank's part of the sum."""
        y = summed(y, self.group)
        return y if bias is None else y + bias

    def embed(self, x: Tensor, *, positions: bool) -> Tensor:
        """Embeddings from each rank's rows of them."""
        return summed(x, self.group)

    def begin(self, x: Tensor, *, positions: bool) -> Tensor:
        """The residual stream before the first layer."""
        return x

    def end(self, x: Tensor) -> Tensor:
        """Hidden states for the loss, whose gradients are parts of a sum."""
        return copied(x, self.group)


@dataclass
class SequenceExchange(Exchange):
    """The same with the residual stream split by tokens."""

    length: int = 0
    """Tokens of a row, which attention is told."""
    piece: Tensor | None = None
    whole: Tensor | None = None
    latest: Taken | None = None
    """Of the last block of this forward pass."""

    def start(self) -> None:
        """A forward pass begins: no block of it is before the next."""
        if not recomputing():
            self.latest = None

    def enter(self, x: Tensor) -> Tensor:
        """Tokens of all ranks; kept in mind until the block is left."""
        made = gathered(x, self.group)
        self.piece, self.whole = x.detach(), made.detach()
        return made

    def leave(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's tokens of the sum."""
        piece, whole = self.piece, self.whole
        self.piece = self.whole = None
        assert piece is not None, "a block is left that was not entered"
        assert whole is not None
        taken = Taken(piece, whole, None if recomputing() else self.latest)
        if not recomputing():
            self.latest = taken
        made = scattered(y, self.group, piece, whole, taken)
        return made if bias is None else made + bias

    def embed(self, x: Tensor, *, positions: bool) -> Tensor:
        """Parts of a sum, until learned positions are to be added to it."""
        return summed(x, self.group) if positions else x

    def begin(self, x: Tensor, *, positions: bool) -> Tensor:
        """This rank's tokens."""
        even_share(x.shape[0], x.shape[1], self.group.size())
        return own_part(x, self.group) if positions else scattered(x, self.group)

    def end(self, x: Tensor) -> Tensor:
        """Tokens of all ranks, row by row."""
        return gathered(x, self.group).view(-1, self.length, x.shape[-1])


def even_share(rows: int, length: int, ranks: int) -> int:
    """Tokens of each rank where tensor ranks split the residual stream."""
    if rows * length % ranks:
        raise UserError(
            f"{rows} rows of {length} tokens cannot be split evenly over {ranks} tensor ranks; "
            "change data.sequence_length or set layout.sequence_parallel=false"
        )
    return rows * length // ranks


def _hook(model: Decoder, exchange: Exchange, rows: VocabularyRows) -> None:
    """Put `exchange` around the blocks of `model`, or of those that a pipeline has left of it."""
    positions = model.spec.rope is None
    model.impl = replace(model.impl, vocabulary=rows)
    if model.embed is not None:
        model.embed.forward = partial(_embed, model.embed, rows, exchange, positions)  # type: ignore[method-assign]
    if isinstance(exchange, SequenceExchange):
        next(iter(model.layers)).register_forward_pre_hook(lambda _, given: exchange.start())
    if (first := model.layers._modules.get("0")) is not None:
        first.register_forward_pre_hook(lambda _, given: (exchange.begin(given[0], positions=positions), *given[1:]))
    if model.norm is not None:
        model.norm.register_forward_hook(lambda _, given, made: exchange.end(made))
    layers: list[Any] = list(model.layers)
    for layer in layers:
        attention, mlp = layer.attention, layer.mlp
        attention.register_forward_pre_hook(_entering_attention(exchange))
        _add_bias_outside(attention.o)
        attention.register_forward_hook(partial(_leaving, exchange, attention.o))
        mlp.register_forward_pre_hook(lambda _, given: exchange.enter(given[0]))
        down = mlp.down if isinstance(mlp, Mlp) else None
        if down is not None:
            _add_bias_outside(down)
        mlp.register_forward_hook(partial(_leaving, exchange, down))


def _share_key_heads(model: Decoder, ranks: int) -> None:
    """Fewer key heads than ranks: those that use a head each compute a part of it, and give it to the others."""
    sharing = ranks // model.spec.kv_heads
    if sharing <= 1:
        return
    group, _ = dist.new_subgroups(sharing, timeout=TIMEOUT)  # neighbours, as tensor is the innermost axis
    layers: list[Any] = list(model.layers)
    for layer in layers:
        for projection in (layer.attention.k, layer.attention.v):
            projection.register_forward_hook(lambda _, given, made: joined_columns(made, group))


def _embed(embed: nn.Embedding, rows: VocabularyRows, exchange: Exchange, positions: bool, tokens: Tensor) -> Tensor:
    return exchange.embed(embedded_here(tokens, embed.weight, rows), positions=positions)


def _entering_attention(exchange: Exchange) -> Callable[[Attention, tuple[Tensor, ForwardContext]], tuple[Any, ...]]:
    """Attention works on whole rows; what is gathered is all rows one after another."""

    def enter(_: Attention, given: tuple[Tensor, ForwardContext]) -> tuple[Tensor, ForwardContext]:
        x, ctx = given
        if not isinstance(exchange, SequenceExchange):
            return exchange.enter(x), ctx
        exchange.length = ctx.mask.queries
        return exchange.enter(x).view(-1, exchange.length, x.shape[-1]), ctx

    return enter


def _add_bias_outside(out: nn.Linear) -> None:
    """The projection out of a block without its bias, which belongs to the sum and not to each part."""
    if out.bias is not None:
        out.forward = lambda input: F.linear(input, out.weight)  # type: ignore[method-assign]


def _leaving(exchange: Exchange, out: nn.Linear | None, _: nn.Module, given: Any, made: Any) -> Any:
    bias = None if out is None else out.bias
    if not isinstance(made, tuple):
        return exchange.leave(made, bias)
    y, balance = made
    balance = None if balance is None else gradient_shared(balance, exchange.group)
    return exchange.leave(y, bias), balance


@torch.no_grad()
def sum_partial_gradients(model: nn.Module) -> None:
    """Add up, over tensor ranks, the gradients of which each has a part. Once a step, after its last backward."""
    splits = splits_of(model)
    partial_ones = list(_partial_gradients(model))
    if not partial_ones:
        return
    flat = torch.cat([gradient.flatten() for gradient in partial_ones])
    dist.all_reduce(flat, group=next(iter(splits.values())).mesh.get_group())
    parts = flat.split([gradient.numel() for gradient in partial_ones])
    for gradient, part in zip(partial_ones, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _partial_gradients(model: nn.Module) -> Iterator[Tensor]:
    splits = splits_of(model)
    for name, p in model.named_parameters():
        if p.grad is not None and name in splits and splits[name].summed:
            yield local(p.grad)


def refusal(spec: ModelSpec, layout: Layout, levers: Levers) -> str | None:
    """One sentence about what of a model or of the levers tensor ranks cannot split; None where all is well."""
    t = layout.tensor
    if t == 1:
        return None
    if sentence := indivisible(spec, t):
        return sentence
    if levers.loss == "plain":
        return f"levers.loss is plain, which needs all logits, but layout.tensor is {t}; set levers.loss=fused"
    if levers.tiles > 1:
        return (
            f"levers.tiles is {levers.tiles}, which takes layers apart where tensor ranks meet, but layout.tensor is "
            f"{t}; set levers.tiles=1"
        )
    if levers.matmul != "native":
        return (
            f"levers.matmul is {levers.matmul}, whose scales are of whole matrices, but layout.tensor is {t}; "
            "set levers.matmul=native"
        )
    return _states_refusal(spec, layout, levers)


def _states_refusal(spec: ModelSpec, layout: Layout, levers: Levers) -> str | None:
    """Formats whose numbers share a row or a block of it with others."""
    t = layout.tensor
    if levers.optimizer_states == "factored":
        return (
            f"levers.optimizer_states is factored, which needs all rows and columns of a weight, but layout.tensor is "
            f"{t}; take 8bit or bf16"
        )
    rows = [spec.query_size, *(size for _, size in widths(spec))]
    if levers.optimizer_states == "8bit" and any(length // t % EIGHT_BIT_BLOCK for length in rows):
        return (
            f"levers.optimizer_states is 8bit, whose blocks of {EIGHT_BIT_BLOCK} do not divide rows cut in {t}; "
            "lower layout.tensor or take bf16"
        )
    return None
