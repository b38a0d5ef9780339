"""Processes that run one function together: whose answer comes back, and what is told when one of them does not."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.shared_server import PRELOADED
from tightfit.errors import UserError
from tightfit.launch import stopped, together
from tightfit.launch.together import run_together, share_threads

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs each process imports for itself")


def ranks_seen(device: torch.device, offset: int) -> list[int]:
    """Everybody's rank, plus `offset`."""
    own = torch.tensor([dist.get_rank() + offset], device=device)
    all_of_them = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, own)
    return [int(each) for each in all_of_them]


def fail_on_rank_1(device: torch.device, how: str) -> None:
    """The others wait for it."""
    dist.barrier()  # else the first to arrive may be gone before all have met
    if dist.get_rank() == 1:
        if how == "refusal":
            raise UserError("rank 1 does not like this; give it something else")
        if how == "error":
            raise ArithmeticError("a mistake of ours")
        time.sleep(0.5 if how == "known later" else 0)
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    if how == "known later":
        raise RuntimeError("connection reset by peer")
    dist.barrier() if how != "stopped" else time.sleep(60)


def test_the_first_one_s_answer_comes_back(server: None) -> None:
    assert run_together(2, ranks_seen, 5, modules=PRELOADED) == [5, 6]


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("refusal", UserError, "^rank 1 does not like this; give it something else$"),
        ("error", RuntimeError, r"process 1 of 2 failed:\n(.|\n)*ArithmeticError: a mistake of ours"),
        ("killed", UserError, "process 1 of 2 was ended by SIGKILL, perhaps for want of memory"),
        ("known later", UserError, "process 1 of 2 was ended by SIGKILL, perhaps for want of memory"),
        ("stopped", UserError, r"process 1 of 2 was stopped \(SIGSTOP\), so all were ended; run it again"),
    ],
)
def test_a_failure_of_one_is_told_and_ends_all(
    how: str, kind: type[Exception], said: str, server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopped, "STOPPED_S", 0.3)
    monkeypatch.setattr(together, "LOOK_S", 0.1)
    began = time.monotonic()
    with pytest.raises(kind, match=said):
        run_together(2, fail_on_rank_1, how, modules=PRELOADED)
    assert time.monotonic() - began < 45, "nobody waits for the others' patience to end"


def test_threads_are_shared_where_nobody_said_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    share_threads(3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share_threads(3)
    share_threads(100)
    assert given == [2, 1]
