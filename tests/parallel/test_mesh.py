"""The grid of ranks, and a sentence where the processes are not those of the layout."""

import pytest
import torch

from tests.parallel.fake import fake_group
from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.parallel.mesh import init_distributed, make_mesh, sharding_axes, tensor_axes
from tightfit.parallel.ranks import ALONE, Ranks

CPU = torch.device("cpu")


def test_axes_are_named_and_ordered() -> None:
    with fake_group(16):
        mesh = make_mesh(Layout(data=4, tensor=2, pipeline=2), "cpu")
        assert mesh.mesh_dim_names == ("pipeline", "data", "tensor")
        assert tuple(mesh.shape) == (2, 4, 2)
        assert mesh["tensor"].mesh.tolist() == [0, 1]  # neighbours share the fastest links
        assert mesh["data"].mesh.tolist() == [0, 2, 4, 6]
        ranks = Ranks.of(mesh)
        assert (ranks.rank, ranks.world) == (0, 4)


def test_groups_of_data_ranks_are_neighbours() -> None:
    """Copies across, shards inside, tensor ranks inside those; the data axis is all of it."""
    with fake_group(16):
        mesh = make_mesh(Layout(data=8, zero=3, shard_inside=4, tensor=2), "cpu")
        assert mesh.mesh_dim_names == ("data", "tensor")
        assert mesh["data"].mesh.tolist() == list(range(0, 16, 2))
        shards = sharding_axes(mesh)
        assert shards.mesh_dim_names == ("replicate", "shard")
        assert shards.mesh.tolist() == [[0, 2, 4, 6], [8, 10, 12, 14]]
        axis, grid = tensor_axes(mesh)
        assert axis.mesh.tolist() == [0, 1]
        assert grid.mesh_dim_names == ("replicate", "shard", "tensor")
        assert sharding_axes(make_mesh(Layout(data=16, zero=3), "cpu")).mesh_dim_names == ("data",)


@pytest.mark.parametrize("fields", [{"data": 8, "shard_inside": 4}, {"data": 8, "zero": 3, "shard_inside": 3}])
def test_groups_must_divide_and_split_something(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"layout.shard_inside is \d, but layout.data is 8"):
        Layout.model_validate(fields)


def test_one_process_needs_no_group() -> None:
    with init_distributed(Layout(), CPU) as (mesh, device):
        assert mesh is None
        assert device == CPU
        assert Ranks.of(mesh) is ALONE
        assert not torch.distributed.is_initialized()


def test_too_few_processes_are_told_how_to_start() -> None:
    with pytest.raises(UserError) as caught, init_distributed(Layout(data=4), CPU):
        pass
    assert "has 4 rank(s), but 1 process(es) run" in str(caught.value)
    assert "`tightfit launch JOB`, or with torchrun --nproc-per-node=4 -m tightfit train" in str(caught.value)


def test_too_many_processes_are_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"has 1 rank\(s\), but 2 process\(es\) run; .* or set layout.data=2"):
        init_distributed(Layout(), CPU).__enter__()


def test_a_group_of_another_size_is_refused() -> None:
    with fake_group(8), pytest.raises(UserError, match=r"has 4 rank\(s\), but 8 process\(es\) run"):
        make_mesh(Layout(data=4, zero=3), "cpu")


def test_alone_nothing_is_said_and_nothing_copied() -> None:
    tensor = torch.ones(3)
    assert ALONE.sum(tensor) is tensor
    assert ALONE.max(3) == 3
    assert ALONE.broadcast("word") == "word"
    with ALONE.main_process_first():
        assert ALONE.first
