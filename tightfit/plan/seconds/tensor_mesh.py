"""Traffic of tensor ranks on 2D, 2.5D and 3D meshes: every message of a micro-batch (parallel/tensor_mesh.py).

For a layer with products X [n, in] · Wᵀ [in, out], elements in the collectives of one rank, forward:

| | X | W | Y | backward |
|---|---|---|---|---|
| 2d, 2.5d | n · in / (d q) broadcast | in · out / q broadcast | – | the same, and as much reduced |
| 3d | n · in / q² gathered | in · out / q² gathered | n · out / q² scattered | the same, and X, W once more |

A GPT layer (in = h or 4h, 12 h² weights) on q × q ranks thus has (7 n h + 12 h²) / q elements forward and twice that
backward (Xu and You 2021, table 1, whose backward has the recomputed forward as well; their log₂ q is a tree's depth,
ours a pipelined ring's: 1). 1D has 4 (t − 1)/t · n h whatever t is: a mesh sends less where ranks are many and tokens
more than columns, and its weights go over rows of the mesh, its activations over columns, which are neighbours. On few
ranks, or with few tokens, it sends more. Norms combine a number or two per row; vocabulary and loss: `ends`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tightfit.jobs.layout import Layout
from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.models.spec import ModelSpec
from tightfit.plan.seconds.cost_context import CostContext
from tightfit.plan.seconds.groups import CALL_S, Group
from tightfit.plan.seconds.tensor import TensorTraffic, shared_ends

Axis = Literal["depth", "row", "column"]
Collective = Literal["broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
CONJUGATE: dict[Collective, Collective] = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "broadcast": "reduce",
}
NORM_PASSES = 10, 16
"""Float32 passes of a norm over its block forward and backward: torch's own operations, not a fused kernel."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Collectives of one kind over one axis; `elements` is the payload of all `calls` on a rank, as gathered."""

    kind: Collective
    axis: Axis
    elements: float
    calls: int = 1
    wide: bool = False
    """Float32 whatever the model's numbers are."""

    @property
    def conjugate(self) -> "Message":
        """The collective of backward that belongs to this one of forward."""
        return Message(kind=CONJUGATE[self.kind], axis=self.axis, elements=self.elements, calls=self.calls)


class MeshMessages:
    """The messages of `tokens` tokens of a micro-batch, on all tensor ranks together."""

    def __init__(self, spec: ModelSpec, layout: Layout, tokens: float) -> None:
        self.spec, self.tokens = spec, tokens
        self.depth, self.side, _ = layout.tensor_axes
        self.is_cube = layout.tensor_mesh == "3d"
        self.rank_tokens = tokens / layout.row_parts
        """Tokens of the residual stream on one rank."""

    def layer(self, *, backward: bool) -> list[Message]:
        """Messages of one layer."""
        spec = self.spec
        inner = (spec.mlp_size,) * spec.up_projections
        keys = (spec.kv_size,) * 2
        return [
            *self._product(spec.hidden_size, (spec.query_size, *keys), leaving=False, backward=backward),
            *self._product(spec.query_size, (spec.hidden_size,), leaving=True, backward=backward),
            *self._product(spec.hidden_size, inner, leaving=False, backward=backward),
            *self._product(spec.mlp_size, (spec.hidden_size,), leaving=True, backward=backward),
            *[self._statistics("column", backward=backward)] * spec.norms_per_layer,
            *self._heads(backward=backward),
        ]

    def _product(self, width: int, outputs: tuple[int, ...], *, leaving: bool, backward: bool) -> Iterator[Message]:
        """Messages of X with `width` columns times one weight [out, width] for each of `outputs`; `leaving` is the
        second product of a block, whose axes are swapped."""
        products = self._cubic(width, outputs, leaving=leaving) if self.is_cube else self._summa(width, outputs)
        for message in products:
            if message.kind == "reduce_scatter":  # of Y, whose gradient is gathered
                yield message.conjugate if backward else message
            else:  # of X or W, which both passes fetch; backward then reduces its gradient
                yield from (message, message.conjugate) if backward else (message,)

    def _summa(self, width: int, outputs: tuple[int, ...]) -> Iterator[Message]:
        """Products of 2D and 2.5D meshes, in forward."""
        side, elements = self.side, self.tokens / self.depth * width / self.side
        yield Message(kind="broadcast", axis="column", elements=elements, calls=side)
        for out in outputs:
            yield Message(kind="broadcast", axis="row", elements=width * out / side, calls=side)

    def _cubic(self, width: int, outputs: tuple[int, ...], *, leaving: bool) -> Iterator[Message]:
        """Products of a 3D mesh, in forward."""
        square = self.side**2
        yield Message(kind="all_gather", axis="column" if leaving else "row", elements=self.tokens * width / square)
        for out in outputs:
            yield Message(kind="all_gather", axis="depth", elements=width * out / square)
            yield Message(
                kind="reduce_scatter", axis="row" if leaving else "column", elements=self.tokens * out / square
            )

    def _statistics(self, axis: Axis, *, backward: bool) -> Message:
        """The message of a norm over rows whose columns are split over ranks: sums in float32."""
        if self.spec.norm != "layer":
            return Message(kind="all_reduce", axis=axis, elements=self.rank_tokens, wide=True)
        if backward:
            return Message(kind="all_reduce", axis=axis, elements=2 * self.rank_tokens, wide=True)
        return Message(kind="all_gather", axis=axis, elements=2 * self.rank_tokens * self.side, wide=True)

    def _heads(self, *, backward: bool) -> Iterator[Message]:
        """Messages of norms over all heads together, and of keys and values with fewer heads than ranks."""
        spec = self.spec
        axis: Axis = "row" if self.is_cube else "column"
        if spec.qk_norm_joint:
            yield from [self._statistics(axis, backward=backward)] * 2
        if spec.kv_heads < self.side:
            gathered = Message(kind="all_gather", axis=axis, elements=self.rank_tokens * spec.kv_size)
            yield from [gathered.conjugate if backward else gathered] * 2

    def ends(self, *, backward: bool) -> list[Message]:
        """Messages of the embedding, the last norm and the loss (but for four numbers a row that it combines)."""
        spec, side = self.spec, self.side
        stream = self.rank_tokens * spec.hidden_size
        table = -(-spec.vocab_size // side) * spec.hidden_size
        forward = [
            Message(kind="reduce_scatter", axis="row", elements=stream),
            Message(kind="all_gather", axis="row", elements=stream),
            Message(kind="all_to_all", axis="column", elements=stream),
            Message(kind="all_gather", axis="column", elements=table),
        ]
        if self.is_cube:
            forward += [Message(kind="all_gather", axis="depth", elements=table / side)] * 2
        sums = self._statistics("column", backward=backward)
        return [sums, *(message.conjugate if backward else message for message in forward)]


def mesh_traffic(
    ctx: CostContext, layout: Layout, layer_counts: Sequence[int], *, tokens: float, params: float
) -> TensorTraffic:
    """Traffic of the rank with most of `layer_counts`, which has `params` parameters."""
    depth, side, _ = layout.tensor_axes
    axes = {"column": ctx.group(1, side), "row": ctx.group(side, side), "depth": ctx.group(side * side, depth)}
    spec, number_bytes = ctx.workload.spec, ctx.workload.weight_bytes
    layers, ends, messages = max(layer_counts), shared_ends(layout, layer_counts), MeshMessages(spec, layout, tokens)

    def seconds(found: list[Message]) -> float:
        return sum(message_s(axes[m.axis], m, FLOAT32_BYTES if m.wide else number_bytes) for m in found)

    block_bytes = FLOAT32_BYTES * tokens * spec.hidden_size / layout.tensor
    norm_s = [passes * spec.norms_per_layer * block_bytes / ctx.rates.bytes_s for passes in NORM_PASSES]
    forward_s, backward_s = (
        layers * (seconds(messages.layer(backward=back)) + norm_s[back]) + ends * seconds(messages.ends(backward=back))
        for back in (False, True)
    )
    return TensorTraffic(
        one_way_s=(forward_s + backward_s) / 2,
        recompute_s=layers * (seconds(messages.layer(backward=False)) + norm_s[0]),
        regather_s=0.0,
        once_s=axes["depth"].all_reduce_s(number_bytes * params) if layout.tensor_mesh == "2.5d" else 0.0,
    )


def message_s(group: Group, message: Message, number_bytes: float) -> float:
    """Seconds of one kind of collective; broadcasts and reduces are pipelined round a ring."""
    payload_bytes = number_bytes * message.elements
    if message.kind in ("broadcast", "reduce"):
        return message.calls * (CALL_S + group.hop_s) + payload_bytes / group.ring_bytes_s
    if message.kind == "all_reduce":
        return group.all_reduce_s(payload_bytes)
    return group.all_to_all_s(payload_bytes) if message.kind == "all_to_all" else group.all_gather_s(payload_bytes)
