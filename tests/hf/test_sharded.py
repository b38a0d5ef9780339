"""Two processes over gloo compute what one computes: FSDP2 in every arrangement of the head, and DDP."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.group import Group
from tests.hf.models import gradients, make_batch, make_model
from tightfit.hf import accelerate

WORLD = 2
FAMILY = "qwen3"  # its head is its embedding


def test_two_processes_are_one(tmp_path: Path) -> None:
    with Group(WORLD, tmp_path / "meeting") as pair:
        assert pair.run(run_rank) == [5, 5]


def run_rank() -> int:
    """Compares every arrangement with one process, and says how many there were."""
    rank, compared = dist.get_rank(), 0
    for family, apart, first in (
        ("llama", True, True),
        ("llama", False, True),
        ("llama", True, False),
        (FAMILY, False, True),
    ):
        expected = one_process(family)
        model = make_model(family)
        if first:
            accelerate(model)
        shard(model, head_apart=apart)
        assert_equal(step(accelerate(model), family, rank), expected)
        compared += 1
    model = accelerate(make_model(FAMILY))
    wrapped = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    assert_equal(step(wrapped, FAMILY, rank), one_process(FAMILY))
    return compared + 1


def shard(model: Any, *, head_apart: bool) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if head_apart:
        fully_shard(model.get_output_embeddings(), mesh=mesh)
    fully_shard(model, mesh=mesh)


def one_process(family: str) -> dict[str, Tensor]:
    """Gradients of the unpatched model over both processes' rows."""
    model = make_model(family)
    (sum(model(**batch_of(family, rank)).loss for rank in range(WORLD)) / WORLD).backward()
    return gradients(model)


def batch_of(family: str, rank: int) -> dict[str, Tensor]:
    return make_batch(family, seed=rank)


def step(model: nn.Module, family: str, rank: int) -> dict[str, Tensor]:
    out = model(**batch_of(family, rank))
    assert out.logits is None
    out.loss.backward()
    found = gradients(model)
    return {name.removeprefix("module."): g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-4, atol=1e-5, msg=partial("{}: {}".format, name)
        )
