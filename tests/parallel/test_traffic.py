"""What ranks of a pipeline and groups of shards send, counted from the collectives of a real step among fake ranks.

For data ranks see test_data.py, for tensor ranks test_tensor.py. The planner's costs are made of the same numbers:
two streams a micro-batch and piece of a pipeline rank, and one sum of a rank's shard over groups that hold copies.
"""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import sampled
from tests.distributed.piping import DEEP, Piped
from tests.distributed.training import CPU, Case, build, micro_batches
from tests.parallel.fake import fake_group
from tests.parallel.test_data import Traffic, parameters
from tightfit.parallel.mesh import make_mesh
from tightfit.parallel.ranks import Ranks
from tightfit.train.precision import LossScale
from tightfit.train.step import train_step

Sent = Counter[tuple[str, torch.dtype]]
WORLD, INSIDE = 8, 4
MICRO_BATCHES = 3
SENT, SUMMED = ("send", torch.float32), ("allreduce_", torch.float32)


def step_of(case: Case, rank: int = 0) -> tuple[Sent, int, int]:
    """Elements that a rank's second step sends, a micro-batch's residual stream, and the rank's own parameters."""
    with fake_group(case.layout.ranks, rank):
        mesh = make_mesh(case.layout, "cpu")
        decoder, module, optimizer = build(case, mesh)
        batches = micro_batches(case, 0, 0)
        for watch in (nullcontext(), traffic := Traffic()):
            with watch:
                train_step(module, optimizer, batches, CPU, 1e-3, LossScale(), ranks=Ranks.of(mesh))
        tokens: Tensor = batches[0]["tokens"]
        return traffic.elements, tokens.numel() * case.spec.hidden_size, parameters(decoder)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_groups_of_shards_add_one_sum_of_a_shard(zero: int) -> None:
    M = 3
    case = Case(data=WORLD, zero=zero, shard_inside=INSIDE, micro_batch=1, rows=WORLD * M)
    sent, _, _ = step_of(case)
    whole, _, _ = step_of(replace(case, shard_inside=0))
    P = whole["_reduce_scatter_base_", torch.float32] // (1 if zero == 1 else M)
    assert whole[SUMMED] == 0
    assert dict(sent - whole) == {SUMMED: P // INSIDE}, "once a step, over the groups"
    assert dict(whole - sent) == {}


SCHEDULES: list[dict[str, Any]] = [
    {},
    {"schedule": "gpipe"},
    {"schedule": "zero-bubble"},
    {"schedule": "interleaved", "stages_per_rank": 2, "spec": replace(DEEP, layers=6)},
]


@sampled(2)
@pytest.mark.parametrize("how", SCHEDULES, ids=lambda how: how.get("schedule", "1f1b"))
def test_a_stage_sends_a_stream_each_way_for_every_micro_batch(how: dict[str, Any]) -> None:
    """All but the first send gradients back, all but the last send on: of K v stages, K v − 1 each."""
    case = Piped(pipeline=3, rows=2 * MICRO_BATCHES, **how)
    pieces = case.stages_per_rank
    for rank in range(3):
        sent, stream, _ = step_of(case, rank)
        each_way = 2 * pieces - (rank == 0) - (rank == 2)
        assert dict(sent) == {SENT: each_way * MICRO_BATCHES * stream, ("recv_", torch.float32): sent[SENT]}, rank


def test_tensor_ranks_that_split_the_stream_send_their_part() -> None:
    case = Piped(pipeline=2, tensor=2, rows=2 * MICRO_BATCHES)
    sent, stream, _ = step_of(case)
    assert sent[SENT] == MICRO_BATCHES * stream // 2
    sent, stream, _ = step_of(replace(case, sequence_parallel=False))
    assert sent[SENT] == MICRO_BATCHES * stream


def test_replicas_sum_their_stage_s_gradients_once_a_step() -> None:
    case = Piped(pipeline=2, data=2, rows=4 * MICRO_BATCHES)
    for rank in (0, 2):
        sent, stream, own = step_of(case, rank)
        assert sent[SUMMED] == own
        assert sent[SENT] == MICRO_BATCHES * stream


def test_a_tied_embedding_s_gradient_goes_both_ways_once() -> None:
    case = Piped(pipeline=2, rows=2 * MICRO_BATCHES, spec=replace(DEEP, tied=True))
    for rank in (0, 1):
        sent, stream, _ = step_of(case, rank)
        assert sent[SENT] == MICRO_BATCHES * stream + case.spec.vocab_size * case.spec.hidden_size
