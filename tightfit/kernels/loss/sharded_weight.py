"""Sharded output weights, as the local tensors that this process multiplies with.

A DTensor weight split by rows, Shard(0), means one of two things, and the hidden states say which:
- data parallel (FSDP2): every process has hidden states of its own, plain tensors. The weight is gathered whole; its
  gradients, one per process, are averaged and scattered back to the shards, as FSDP2 does with every other weight.
- vocabulary parallel: all processes have the same hidden states (a replicated DTensor, or plain ones and
  `weight_shards="vocabulary"`). Each keeps its rows of the weight and its columns of the logits; the rows' statistics
  are combined, and the gradients of the hidden states summed, across processes.
A plain weight with `VocabularyRows` is vocabulary parallel too, except that the caller sums the hidden states'
gradients (parallel/tensor.py, in its own collective). Inside a module that FSDP2 has all-gathered the weight is a plain
tensor and none of this applies. Limits: one mesh axis; a weight that both FSDP2 and tensor parallelism split must be
all-gathered by FSDP2 first.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.collectives.conjugate import copy_to_ranks
from tightfit.errors import UserError
from tightfit.kernels.loss.logit_rows import ELSEWHERE, IGNORED, LABEL, LARGEST, LOGSUMEXP, SUM, Combine
from tightfit.kernels.loss.vocab_parallel import VocabularyRows

WeightShards = Literal["auto", "data", "vocabulary"]
WEIGHT_SHARDS = ("auto", "data", "vocabulary")


@dataclass(frozen=True)
class Projection:
    """The local tensors of one process: hidden states, and rows of the weight from `first` on."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    vocabulary: int
    first: int = 0
    group: str = ""
    """Name of the process group that holds the other rows; empty where this process holds all."""

    def targets(self, labels: Tensor, ignore_index: int) -> Tensor:
        """Labels as columns of this process, ELSEWHERE or IGNORED; any other is beyond the columns, where it shows."""
        columns, beyond = labels - self.first, self.weight.shape[0]
        if self.group:
            held = (columns >= 0) & (columns < beyond)
            columns = torch.where(held, columns, ELSEWHERE).masked_fill(labels >= self.vocabulary, beyond)
        return columns.masked_fill(labels < 0, beyond).masked_fill(labels == ignore_index, IGNORED)


def localize(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, shards: WeightShards, rows: VocabularyRows | None = None
) -> Projection:
    """The local projection of this process; plain tensors pass through."""
    if rows is not None:
        return Projection(hidden, weight, bias, rows.vocabulary, rows.first, rows.group)
    if shards not in WEIGHT_SHARDS:
        raise UserError(f"weight_shards is {shards!r}; give one of {', '.join(WEIGHT_SHARDS)}")
    if not dist.is_available():
        return Projection(hidden, weight, bias, weight.shape[0])
    from torch.distributed.tensor import DTensor

    if not any(isinstance(x, DTensor) for x in (hidden, weight, bias)):
        return Projection(hidden, weight, bias, weight.shape[0])
    if not isinstance(weight, DTensor):
        raise UserError(
            f"the weight is a plain tensor but other arguments are DTensors on {_mesh_of(hidden, bias)}; "
            "pass them as local tensors"
        )
    if shards == "vocabulary" or (shards == "auto" and isinstance(hidden, DTensor)):
        return _vocabulary_parallel(hidden, weight, bias)
    return _gathered(hidden, weight, bias)


def _mesh_of(*tensors: Tensor | None) -> str:
    meshes = (getattr(x, "device_mesh", None) for x in tensors)
    return next(str(mesh) for mesh in meshes if mesh is not None)


def _gathered(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Projection:
    """The all-gathered weight; gradients of all processes are averaged."""
    from torch.distributed.tensor import DTensor, Partial

    if isinstance(hidden, DTensor):
        raise UserError("weight_shards is 'data', where hidden states are each process's own: pass hidden.to_local()")

    def whole(x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return x
        return x.full_tensor(grad_placements=[Partial("avg")] * x.device_mesh.ndim)

    full = whole(weight)
    return Projection(hidden, full, None if bias is None else whole(bias), full.shape[0])


def _vocabulary_parallel(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Projection:
    """This process's rows; `torch.chunk` says which they are."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    assert isinstance(weight, DTensor)
    mesh, placements = weight.device_mesh, tuple(weight.placements)
    if mesh.ndim != 1 or placements != (Shard(0),):
        raise UserError(f"a vocabulary-parallel weight is split by rows over one mesh axis, Shard(0), not {placements}")
    if isinstance(hidden, DTensor):
        if tuple(hidden.placements) != (Replicate(),):
            raise UserError(
                f"hidden states beside a vocabulary-parallel weight are replicated, not {hidden.placements}"
            )
        hidden = hidden.to_local()
    local = weight.to_local()
    rows_each = -(-weight.shape[0] // mesh.size())
    own_bias = bias.to_local() if isinstance(bias, DTensor) else bias
    if own_bias is not None and own_bias.shape[0] != local.shape[0]:
        raise UserError(
            f"the bias has {own_bias.shape[0]} values here but the weight {local.shape[0]} rows; shard both"
        )
    first = mesh.get_local_rank() * rows_each
    group = mesh.get_group()
    return Projection(copy_to_ranks(hidden, group), local, own_bias, weight.shape[0], first, group.group_name)


def _processes(group: str) -> dist.ProcessGroup:
    resolve: Any = torch.distributed.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(group)


def combiner(group: str) -> Combine | None:
    """A function from this shard's statistics to those of the whole vocabulary; None without a group."""
    if not group:
        return None
    processes = _processes(group)

    def combine(own: Tensor) -> Tensor:
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(processes.size())]
        dist.all_gather(parts, own.contiguous(), group=processes)
        gathered = torch.stack(parts, dim=1)  # [4, processes, rows]
        combined = torch.empty_like(parts[0])
        combined[LOGSUMEXP] = gathered[LOGSUMEXP].logsumexp(0)
        combined[LABEL], combined[SUM] = gathered[LABEL].sum(0), gathered[SUM].sum(0)
        combined[LARGEST] = gathered[LARGEST].amax(0)
        return combined

    return combine
