"""A ring's messages are on their way while it attends: what is issued before what, and what is waited for when."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.covering import sampled
from tests.distributed.group import Group
from tightfit.kernels.attention.partial_attention import attend_part, attend_part_backward
from tightfit.parallel import ring

Make = Callable[[int], Group]
LENGTH = 8
"""Tokens of a rank."""


class Timeline:
    """Attention to each part with the messages that are on their way meanwhile: sent and not yet waited for."""

    def __init__(self) -> None:
        self.pending: dict[int, torch.dtype] = {}
        self.during: list[list[torch.dtype]] = []
        self._messages = 0

    def sending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """In place of `batch_isend_irecv`."""

        def send(operations: list[dist.P2POp]) -> list[Any]:
            self._messages += 1
            self.pending[self._messages] = operations[0].tensor.dtype
            return [Waited(work, self.pending, self._messages) for work in original(operations)]

        return send

    def attending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """In place of a kernel."""

        def attend(*given: Any) -> Any:
            self.during.append(list(self.pending.values()))
            return original(*given)

        return attend


class Waited:
    """A message's work, which is no longer on its way once somebody waits for it."""

    def __init__(self, work: Any, pending: dict[int, torch.dtype], number: int) -> None:
        self.work, self.pending, self.number = work, pending, number

    def wait(self) -> None:
        self.work.wait()
        self.pending.pop(self.number, None)


def timelines() -> tuple[list[list[torch.dtype]], list[list[torch.dtype]]]:
    """Of a forward and a backward pass on this rank; keys are float64, so that their sums' gradients are told apart."""
    made = torch.Generator().manual_seed(dist.get_rank())
    query, key, value = (
        torch.randn(1, heads, LENGTH, 4, generator=made, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)
    )
    line, world = Timeline(), dist.group.WORLD
    assert world is not None
    with (
        patch.object(dist, "batch_isend_irecv", line.sending(dist.batch_isend_irecv)),
        patch.object(ring, "attend_part", line.attending(attend_part)),
        patch.object(ring, "attend_part_backward", line.attending(attend_part_backward)),
    ):
        out: Tensor = ring.ring_attention(query, key, value, None, world, scale=0.5)
        forward, line.during = line.during, []
        assert not line.pending
        out.sum().backward()
    assert not line.pending
    return forward, line.during


@sampled(2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_next_keys_are_on_their_way_while_those_at_hand_are_attended_to(group: Make, ranks: int) -> None:
    """Forward; backward the gradients of keys follow a step behind, from the second part on that others own."""
    keys, gradients = torch.float64, torch.float32
    for forward, backward in group(ranks).run(timelines):
        assert forward == [[keys]] * (ranks - 1) + [[]]
        expected = [[keys] for _ in range(ranks - 1)] + [[]]
        for at in range(2, ranks):
            expected[at] = [*expected[at], gradients]
        assert [sorted(each, key=str) for each in backward] == [sorted(each, key=str) for each in expected]
