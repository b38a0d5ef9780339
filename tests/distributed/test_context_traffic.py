"""What context ranks send, counted by the collectives of real processes, is what head_exchange.py and ring.py say."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.covering import sampled
from tests.distributed.group import Group
from tests.distributed.training import mesh_of
from tests.parallel.test_data import Traffic
from tests.train.models import TINY
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.models.spec import ModelSpec
from tightfit.prove.check_target import CheckTarget
from tightfit.prove.equivalence import build_trained

Make = Callable[[int], Group]
Sent = Counter[tuple[str, torch.dtype]]
ROWS, LENGTH = 2, 64
CASES = {
    "two exchange": (TINY, Layout(context=2)),
    "four exchange two key heads": (TINY, Layout(context=4)),
    "ring of two": (TINY, Layout(context=2, ring=2)),
    "ring of four": (TINY, Layout(context=4, ring=4)),
    "ring of two around two": (TINY, Layout(context=4, ring=2)),
    "recomputed": (replace(TINY, kv_heads=4), Layout(context=4, ring=2)),
}


def sent_in_a_step(target: CheckTarget) -> Sent:
    """Elements of the second step's all-to-alls and sends."""
    mesh, device = mesh_of(target.layout), torch.device("cpu")
    model, traffic = build_trained(target, mesh, device), Traffic()
    model.step(target, 0, lambda phase: None)
    original = dist.batch_isend_irecv

    def counted(operations: list[dist.P2POp]) -> Any:
        for each in operations:
            if each.op is dist.isend:
                traffic.elements["send", each.tensor.dtype] += each.tensor.numel()
        return original(operations)

    with traffic, patch.object(dist, "batch_isend_irecv", counted):
        model.step(target, 1, lambda phase: None)
    return traffic.elements


@sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_what_is_sent_is_the_formula(group: Make, name: str) -> None:
    spec, layout = CASES[name]
    again = name == "recomputed"
    target = CheckTarget(
        spec,
        layout.model_copy(update={"micro_batch": ROWS}),
        Levers(checkpoint_every=1) if again else Levers(),
        length=LENGTH,
    )
    for sent in group(layout.ranks).run(sent_in_a_step, target):
        found = {kind: count for kind, count in sent.items() if kind[0] in ("alltoall_base_", "send")}
        assert found == {kind: count for kind, count in formula(spec, layout, again=again).items() if count}


def formula(spec: ModelSpec, layout: Layout, *, again: bool) -> dict[tuple[str, torch.dtype], int]:
    """Elements of all-to-alls (a rank's own part among them) and of sends, in a step of one micro-batch.

    What is sent in a recomputed layer's forward is sent once more.
    """
    tokens, u, r = ROWS * LENGTH // layout.context, layout.ulysses_ranks, layout.ring
    query, keys = spec.heads * spec.head_dim, 2 * max(spec.kv_heads, u) * spec.head_dim
    forwards = 2 if again else 1
    exchanged = (forwards + 1) * spec.layers * tokens * (2 * query + keys) if u > 1 else 0
    passes = (forwards + 1 + 1) * spec.layers * (r - 1) * tokens * keys  # and the gradients, float32 as all is here
    return {("alltoall_base_", torch.float32): exchanged, ("send", torch.float32): passes}
