"""Nobody waits for ever: ranks that cannot meet, or meet no more, are told so."""

import time
from collections.abc import Callable
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from tests.distributed.group import Group
from tests.distributed.piping import Piped
from tests.distributed.training import CPU, Case, build, micro_batches
from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.parallel import mesh
from tightfit.parallel.ranks import Ranks
from tightfit.train.precision import LossScale
from tightfit.train.step import inputs, train_step

Make = Callable[[int], Group]
SHORT_S = 2


def test_ranks_of_different_layouts_are_told(group: Make) -> None:
    """Each would make the groups of its own layout, and wait for the others there."""
    for sentence in group(2).run(join_differently):
        assert "do not agree on the layout: data is 2 on rank 0 and 1 on rank 1" in sentence


def join_differently() -> str:
    layout = Layout(data=2) if dist.get_rank() == 0 else Layout(pipeline=2)
    try:
        with mesh.init_distributed(layout, CPU):
            return "nothing was wrong"
    except UserError as error:
        return str(error)


def test_a_rank_that_does_not_come_is_given_up(group: Make) -> None:
    """The last rank is absent from its tensor axis, whose group is one of torch's own making."""
    waited = group(4).run(reduce_without_the_last)
    assert waited[:2] == [None, None], "the other two met"
    assert waited[2] is not None
    assert waited[2] > SHORT_S / 2, "it has waited, and not for the half hour that is usual"


def reduce_without_the_last() -> float | None:
    with (
        patch.object(mesh, "TIMEOUT", timedelta(seconds=SHORT_S)),
        mesh.init_distributed(Layout(data=2, tensor=2), CPU) as (made, _),
    ):
        assert made is not None
        _set_pg_timeout(timedelta(minutes=30))  # the shared group's, as it was
        if dist.get_rank() == 3:
            return None
        began = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1), group=made.get_group("tensor"))
        except RuntimeError:
            return time.monotonic() - began
        return None


def test_a_process_that_works_alone_is_waited_for_longer(group: Make) -> None:
    """As the first one does when it tokenizes, or writes a checkpoint, for longer than collectives may take."""
    assert group(2).run(wait_for_the_first) == [True, True]


def wait_for_the_first() -> bool:
    with (
        patch.object(mesh, "TIMEOUT", timedelta(seconds=SHORT_S)),
        mesh.init_distributed(Layout(data=2), CPU) as (made, _),
    ):
        ranks = Ranks.of(made)
        ranks.barrier()
        began = time.monotonic()
        try:
            if ranks.first:
                time.sleep(2 * SHORT_S)
            ranks.barrier()
        finally:
            _set_pg_timeout(timedelta(minutes=30))  # the shared group's, as it was
        return time.monotonic() - began > SHORT_S


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_tokens_that_do_not_divide_are_told_by_every_stage(group: Make, training: bool) -> None:
    """Not by the first stage alone, for whose hidden states the others would wait."""
    case = Piped(tensor=2, micro_batch=1, rows=2)
    for sentence in group(4).run(step_on_odd_rows, case, training):
        assert "1 rows of 15 tokens cannot be split evenly over 2 tensor ranks" in sentence


def step_on_odd_rows(case: Case, training: bool) -> str:
    made = mesh.make_mesh(case.layout, "cpu")
    ranks = Ranks.of(made)
    _, module, optimizer = build(case, made)
    batches = [{name: value[:, :15] for name, value in batch.items()} for batch in micro_batches(case, 0, ranks.rank)]
    try:
        if training:
            train_step(module, optimizer, batches, CPU, 1e-3, LossScale(), ranks=ranks)
        else:
            module(**inputs(batches[0], CPU))
    except UserError as error:
        return str(error)
    return "nothing was wrong"
