"""Traffic of tensor ranks: the collectives of a micro-batch, each over tokens × hidden size (parallel/tensor.py).

With the residual stream whole on every rank, a block's end is an all-reduce in forward, its beginning one in backward;
the embedding and the hidden states of the loss add one each. Split by tokens (sequence parallelism), each all-reduce
becomes a reduce-scatter and an all-gather, and backward gathers once more what each block took in. A recomputed layer
repeats its forward: without the last all-reduce, which nothing in backward needs, and gathering only once.
A tensor rank sends (t − 1)/t of a gather's or a scatter's elements, and twice that of an all-reduce's.
Not counted: the loss gathers four numbers per row from each rank, and once a step the gradients of norms are summed.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorCalls:
    """Collectives over tokens × hidden size of one micro-batch."""

    all_reduces: int = 0
    all_gathers: int = 0
    reduce_scatters: int = 0

    def plus(self, other: "TensorCalls") -> "TensorCalls":
        """Both."""
        return TensorCalls(
            self.all_reduces + other.all_reduces,
            self.all_gathers + other.all_gathers,
            self.reduce_scatters + other.reduce_scatters,
        )

    def sent_elements(self, payload: int, ranks: int) -> float:
        """What a rank sends, where each collective is over `payload` elements."""
        return (2 * self.all_reduces + self.all_gathers + self.reduce_scatters) * payload * (ranks - 1) / ranks


def forward_calls(layers: int, *, sequence_parallel: bool, ends: int = 1) -> TensorCalls:
    """Of a forward pass through `layers`; `ends` is 1 for the embedding and the loss together, 0 without them."""
    pairs = 2 * layers + ends
    return TensorCalls(0, pairs, pairs) if sequence_parallel else TensorCalls(pairs)


def backward_calls(layers: int, recomputed: int, *, sequence_parallel: bool, ends: int = 1) -> TensorCalls:
    """Of the backward pass, in which `recomputed` of the layers are run again and the others gather again."""
    made = forward_calls(layers, sequence_parallel=sequence_parallel, ends=ends)
    kept = layers - recomputed
    return made.plus(again_calls(recomputed, sequence_parallel=sequence_parallel)).plus(
        regather_calls(kept, sequence_parallel=sequence_parallel)
    )


def again_calls(recomputed: int, *, sequence_parallel: bool) -> TensorCalls:
    """Of recomputing layers."""
    return TensorCalls(0, 2 * recomputed, 2 * recomputed) if sequence_parallel else TensorCalls(recomputed)


def regather_calls(layers: int, *, sequence_parallel: bool) -> TensorCalls:
    """Of bringing back what the blocks of layers took in: a block ahead of backward, which hides them."""
    return TensorCalls(0, 2 * layers if sequence_parallel else 0)
