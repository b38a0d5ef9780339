"""States on the host under FSDP2, on one GPU that is a group of its own: the streams of both must not race."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.train.models import TINY, ragged_batch
from tightfit.collectives.shards import local
from tightfit.jobs.job import Optimizer
from tightfit.jobs.levers import Levers
from tightfit.levers.checkpointing import checkpoint_layers
from tightfit.models.blank import blank_decoder
from tightfit.models.initialisation import init_weights
from tightfit.parallel.data import materialise, shard
from tightfit.train.optimizer.adamw import MasterAdamW
from tightfit.train.precision import LossScale
from tightfit.train.step import train_step

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
WIDE = replace(TINY, layers=6, hidden_size=512, heads=8, kv_heads=4, head_dim=64, mlp_size=1536, vocab_size=2048)
STEPS = 6


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,), mesh_dim_names=("data",))
    dist.destroy_process_group()


def trained(mesh: DeviceMesh, zero: int, **levers: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of some steps in bf16 with float32 masters."""
    given = Levers(optimizer_states="fp32", **levers)
    model = blank_decoder(WIDE, "meta", torch.float32)
    checkpoint_layers(model, given)
    shard(model, mesh, zero, "bf16")
    materialise(model, CUDA if given.offload == "none" else torch.device("cpu"))
    torch.manual_seed(0)
    init_weights(model, device=CUDA)
    optimizer = MasterAdamW(model, Optimizer(lr=1e-3), torch.bfloat16, given, device=CUDA, module=model)
    losses = []
    for step in range(STEPS):
        batch = {name: value % WIDE.vocab_size for name, value in ragged_batch(4, seed=step).items()}
        losses.append(train_step(model, optimizer, [batch], CUDA, 1e-3, LossScale()).loss)
    optimizer.state()
    return losses, {name: local(p).float().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize(
    "levers",
    [
        {"offload": "optimizer"},
        {"offload": "optimizer", "offload_update": "host"},
        {"offload": "optimizer", "checkpoint_every": 1, "offload_checkpoints": True},
    ],
)
def test_offloaded_shards_train_as_those_on_the_gpu(mesh: DeviceMesh, zero: int, levers: dict[str, Any]) -> None:
    """Gradients are kept in 16 bits where masters are on the host, so weights differ by rounding."""
    (ours, weights), (theirs, expected) = trained(mesh, zero, **levers), trained(mesh, zero)
    assert ours == pytest.approx(theirs, rel=2e-2)
    for name, weight in expected.items():
        assert (weights[name] - weight).norm() <= 2e-2 * weight.norm() + 1e-3, name


def test_it_is_the_same_every_time(mesh: DeviceMesh) -> None:
    """A race would show."""
    first, again = (trained(mesh, 3, offload="optimizer", update_in_backward=True) for _ in range(2))
    assert first[0] == again[0]
    assert all(torch.equal(first[1][name], weight) for name, weight in again[1].items())
