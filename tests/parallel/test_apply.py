"""What `apply` makes of a decoder, and what it refuses."""

import math
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from tests.covering import sampled
from tests.distributed.training import Case, train
from tests.parallel.fake import fake_group
from tests.train.models import TINY, ragged_batch, tiny_model
from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.lever_table import LOSS_CHUNK_BYTES
from tightfit.jobs.levers import Levers
from tightfit.kernels.loss.linear_cross_entropy import CHUNK_BYTES
from tightfit.parallel.apply import apply, cut
from tightfit.parallel.mesh import make_mesh
from tightfit.parallel.pipeline_stage import stage_outputs
from tightfit.parallel.ranks import Ranks


def test_one_process_gets_its_own_decoder_back() -> None:
    model = tiny_model()
    assert apply(model, None, Layout(), Levers(checkpoint_every=1), "fp32") is model


def test_stages_have_their_engines() -> None:
    with fake_group(8):
        layout = Layout(data=8)
        model = tiny_model()
        made = apply(model, make_mesh(layout, "cpu"), layout, Levers(), "fp32")
        assert isinstance(made, DistributedDataParallel)
        assert made.module is model
        for zero in (1, 2, 3):
            model, layout = tiny_model(), Layout(data=8, zero=zero)
            assert apply(model, make_mesh(layout, "cpu"), layout, Levers(), "fp32") is model
            assert isinstance(model, FSDPModule)


@sampled(2)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_rank_of_a_fake_world_takes_steps(zero: int) -> None:
    """One process stands for the first of eight ranks, as it does where memory is measured on a single GPU."""
    with fake_group(8):
        case = Case(data=8, zero=zero, micro_batch=1, rows=16, steps=2)
        mesh = make_mesh(case.layout, "cpu")
        share = train(case, mesh, Ranks.of(mesh))
    assert len(share.results) == 2
    assert all(math.isfinite(result.loss) for result in share.results)


def test_the_loss_is_chosen_from_outside() -> None:
    batch = ragged_batch(2)
    fused, plain, small = tiny_model(), tiny_model(), tiny_model()
    apply(plain, None, Layout(), Levers(loss="plain"), "fp32")
    apply(small, None, Layout(), Levers(loss_chunk_bytes=1), "fp32")
    assert plain.impl.linear_cross_entropy == "eager"
    assert small.impl.loss_chunk_bytes == 1
    losses = [model(batch["tokens"], batch["labels"]).loss.item() for model in (fused, plain, small)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


@pytest.mark.parametrize(
    ("layout", "levers", "words"),
    [
        (Layout(tensor=2), Levers(loss="plain"), ["levers.loss is plain", "layout.tensor is 2"]),
        (Layout(data=2, expert=2), Levers(), ["layout.expert is 2", "has no experts"]),
    ],
)
def test_what_is_not_trained_is_refused(layout: Layout, levers: Levers, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        cut(tiny_model(), None, layout, levers)
    assert all(word in str(caught.value) for word in words)


def test_a_job_that_says_nothing_has_the_kernel_s_own_chunk() -> None:
    """Said twice, as planning must not import kernels and kernels are used without jobs."""
    assert Levers().loss_chunk_bytes == LOSS_CHUNK_BYTES == CHUNK_BYTES


@pytest.mark.parametrize(("mesh", "depth", "ranks", "rows"), [("2d", 1, 4, 2), ("2.5d", 2, 8, 1), ("3d", 1, 8, 1)])
def test_a_stage_on_a_mesh_sends_its_block(mesh: Any, depth: int, ranks: int, rows: int) -> None:
    """All tensor ranks together send the residual stream once; rows that are too few are filled up."""
    layout = Layout(tensor=ranks, tensor_mesh=mesh, tensor_depth=depth, pipeline=2, micro_batch=4)
    for given in (4, 3):
        (sent,) = stage_outputs(TINY, layout, given, 8, torch.float32)
        assert sent.shape == (rows, 8, TINY.hidden_size // 2)
        assert ranks * sent.numel() == 4 * 8 * TINY.hidden_size
