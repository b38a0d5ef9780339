"""Data parallelism: every rank trains on its own rows, and gradients are summed over ranks.

Summed, not averaged: the loss is already divided by the counted tokens of the whole step, over all ranks. `zero: 0` is
torch's DDP, the others FSDP2 with one group per layer, one for an untied embedding, and the root, which has the final
norm, the head and a tied embedding. (The fused loss reads the head's weight directly: it is whole there, because the
root stays all-gathered through forward and backward.)

Bytes per parameter on one of N ranks in mixed precision (bf16 or fp16 with float32 masters), M micro-batches a step:

| zero | weights | gradients | masters and moments | all-gathered weights |
|---|---|---|---|---|
| 0 | 2 | 2, in DDP's buckets, which stay between steps | 12 | – |
| 1 | – | 4/N; with M > 1 also 4 from the first micro-batch to the last | 12/N | 2, forward to the end of the step |
| 2 | – | 4/N, and 4 for the layer being reduced | 12/N | 2, forward to the end of the step |
| 3 | – | 4/N, and 4 for the layer being reduced | 12/N | 2, root and about two layers at a time |

DDP's gradients are views of its buckets, so they are zeroed after a step, not freed. Only after the first step they are
freed: DDP then rebuilds its buckets in the order in which backward ran, and would hold old and new ones. (The first two
steps, before gradients are views, hold gradients twice where M > 1.)
FSDP2's float32 shards are the master weights; a 16-bit copy exists only while all-gathered. It reduces in float32, so
sharded gradients are float32 as well. With fp32 nothing is cast, and with pure-bf16 everything is bf16.

Elements that a rank sends per parameter and step (an all-reduce counts as reduce-scatter and all-gather):

| zero | all-gather of weights | reduction of gradients |
|---|---|---|
| 0 | – | 2 (N−1)/N, 16 bits each, after the last micro-batch, overlapping its backward |
| 1 | (N−1)/N | (N−1)/N in float32, at the last micro-batch |
| 2 | (N−1)/N | M (N−1)/N in float32 |
| 3 | 2 M (N−1)/N; embedding and root M (N−1)/N | M (N−1)/N in float32 |

Hybrid sharding (`layout.shard_inside`) puts the number of ranks in a group in place of N, and adds one all-reduce of a
rank's float32 shard of gradients over the groups, at the last micro-batch.

Experts split by expert parallelism (expert.py) are an FSDP2 group of their own: N is then the number of ranks that hold
the same experts.

Zero 1 and 2 keep weights all-gathered until the step's last backward: resharding between micro-batches would not lower
the peak. Source: Rajbhandari et al. 2020 (ZeRO), Zhao et al. 2023 (FSDP).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.futures import Future, collect_all
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from tightfit.jobs.job import PrecisionName
from tightfit.models.decoder import Decoder, DecoderOutput
from tightfit.models.layers.mlp import ExpertWeights, RoutedMlp
from tightfit.models.number_formats import COMPUTE_DTYPES, keeps_master_weights
from tightfit.parallel.expert import expert_parameters, expert_sharding


def replicate(model: Decoder, mesh: DeviceMesh) -> DistributedDataParallel:
    """Zero 0: DDP. `model` must already have the dtype it trains in; every rank gets the first rank's weights."""
    fake = isinstance(model.embed.weight, FakeTensor)  # fake tensors have no values to broadcast
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    # Other ranks hold other experts; buffers are packed weights under adapters, which never change.
    ignore(model, [*expert_parameters(model), *(name for name, _ in model.named_buffers())])
    replica = DistributedDataParallel(
        model, process_group=mesh.get_group("data"), gradient_as_bucket_view=True, init_sync=not fake
    )
    replica.register_comm_hook(mesh.get_group("data"), _sum_hook)
    return replica


def _sum_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """All-reduce by sum. DDP's own reduction divides by the number of ranks; multiplying that back would round.

    With gloo one gradient at a time: its order of additions depends on where in its tensor a number is, and DDP's
    buckets are others in a run's first step than later, so that a resumed run would be rounded otherwise.
    """
    whole: Tensor = bucket.buffer()
    if dist.get_backend(group) == dist.Backend.GLOO:
        works = [dist.all_reduce(gradient, group=group, async_op=True) for gradient in bucket.gradients()]
        futures: list[Future[Any]] = [work.get_future() for work in works if work is not None]
        return collect_all(futures).then(lambda _: whole)
    work = dist.all_reduce(whole, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda _: whole)  # a fake group's future has no value of its own


def shard(model: Decoder, mesh: DeviceMesh, zero: int, precision: PrecisionName) -> Decoder:
    """Zero 1, 2 or 3: FSDP2, in place. `model` may be on the meta device; `materialise` allocates it afterwards."""
    _register_output_type()
    policy = _mixed_precision(precision)
    modules: list[nn.Module | None] = [*model.layers, None if model.spec.tied else model.embed]
    if (experts_mesh := expert_sharding(model)) is not None:
        for layer in model.layers:
            _shard_experts(layer, experts_mesh, policy, reshard_after_forward=zero == 3)
    for module in filter(None, modules):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=zero == 3)
    if isinstance(model.embed, FSDPModule):
        model.embed.set_unshard_in_backward(False)  # its gradient does not depend on its weight
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for group in _fsdp_modules(model):
        if not (isinstance(group, ExpertWeights) and _is_alone(model)):  # FSDP2 would divide by 1, into another copy
            group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)  # otherwise FSDP2 uses PREMUL_SUM, which gloo lacks
    vars(model)["zero"] = zero  # read by `micro_batch`
    return model


def _shard_experts(layer: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, reshard_after_forward: bool) -> None:
    """Make the layer's experts an FSDP2 group of their own, over the ranks that hold the same experts."""
    if isinstance(layer.mlp, RoutedMlp):
        fully_shard(layer.mlp.experts, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)


def _is_alone(model: nn.Module) -> bool:
    """Whether no other data rank holds the same experts as this one."""
    mesh = expert_sharding(model)
    return mesh is not None and mesh.size() == 1


def _mixed_precision(precision: PrecisionName) -> MixedPrecisionPolicy:
    """All-gather float32 masters in 16 bits and reduce gradients in float32; without masters, cast nothing.

    Inputs are not cast: tokens are integers, and layers get what the embedding returned.
    """
    if not keeps_master_weights(precision):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(COMPUTE_DTYPES[precision], torch.float32, cast_forward_inputs=False)


def _register_output_type() -> None:
    """Before torch 2.13, FSDP2 finds output tensors (for its backward hooks) in dataclasses only if registered."""
    if DecoderOutput not in _pytree.SUPPORTED_NODES:
        _pytree.register_dataclass(DecoderOutput)


def materialise(model: Decoder, device: torch.device) -> None:
    """Allocate, uninitialised, the shards of a model made on the meta device."""
    model.to_empty(device=device)
    if model.spec.tied and model.head is not None:  # middle pipeline stages have no head
        model.head.weight = model.embed.weight


def _fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


@contextmanager
def micro_batch(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Wrap forward and backward of a micro-batch: the last one of a step reduces gradients and reshards weights.

    ZeRO-2 and 3 reduce, and ZeRO-3 reshards, at every micro-batch.
    """
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        root: Any = model
        root.set_requires_gradient_sync(last or root.zero > 1)
        root.set_requires_all_reduce(last)  # over the replicas of hybrid sharding
        root.set_reshard_after_backward(last or root.zero == 3)
    yield


def reshard_all(model: nn.Module) -> None:
    """Reshard weights that a forward without backward has left all-gathered."""
    for module in _fsdp_modules(model):
        module.reshard()
