"""Simulation: run the training code on fake tensors as one rank of a fake process group.

Fake tensors have shapes and storages but no bytes, and the fake process group answers for all other ranks, so the real
training code runs unchanged, in seconds and without memory, for any model and world size. The tensors are on the CPU
(torch without CUDA aborts on fake CUDA tensors in autograd); `cuda_rules` replaces operations that differ on a GPU.
Limits: only the first rank of each pipeline stage is traced; values are unknown, so MoE routing is assumed balanced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.errors import UserError
from tightfit.memory.cuda_rules import cuda_scratch, fused_attention
from tightfit.memory.faking import Faking
from tightfit.memory.tracing import Tracer


@contextmanager
def simulated() -> Iterator[Tracer]:
    """Inside the block tensors are fake, attention and workspaces are a GPU's, and the tracer records allocations."""
    tracer = Tracer(cuda_scratch)
    with tracer.listening(), fused_attention(), Faking(tracer), dtensor_planning_unseen(tracer):
        yield tracer


@contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[None]:
    """A fake process group in which this process is rank `rank` of `ranks`."""
    if dist.is_initialized():
        raise UserError("a simulated world cannot be made inside a running process group; simulate in another process")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with _shapes_known():
            yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


@contextmanager
def _shapes_known() -> Iterator[None]:
    """Pipeline stages of torch 2.13 ask each other whether they know their shapes; here no other stage would answer."""
    from torch.distributed.pipelining import PipelineStage

    stage: Any = PipelineStage
    original = getattr(stage, "_warmup_backward_result", None)
    if original is None:
        yield
        return
    stage._warmup_backward_result = lambda self, received_result=None: torch.ones(1, dtype=torch.int32)
    try:
        yield
    finally:
        stage._warmup_backward_result = original


def _forget_meshes() -> None:
    """Clear DTensor's sharding cache, which would confuse this mesh with that of the next simulated stage."""
    from torch.distributed.tensor import DTensor

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


@contextmanager
def first_chunk_only() -> Iterator[None]:
    """Inside the block `torch.chunk` returns the first chunk for every rank: making a thousand takes minutes."""
    whole = torch.chunk
    torch.chunk = _first_chunk
    try:
        yield
    finally:
        torch.chunk = whole


def _first_chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    return (input.narrow(dim, 0, -(-input.shape[dim] // chunks)),) * chunks


@contextmanager
def dtensor_planning_unseen(tracer: Tracer) -> Iterator[None]:
    """DTensor propagates shapes with fake tensors of the whole size; the tracer must not count them."""
    from torch.distributed.tensor import DTensor

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    original = propagator._propagate_tensor_meta_non_cached

    def unseen(*arguments: object, **options: object) -> object:
        with tracer.pause():
            return original(*arguments, **options)

    propagator._propagate_tensor_meta_non_cached = unseen
    try:
        yield
    finally:
        del propagator._propagate_tensor_meta_non_cached
