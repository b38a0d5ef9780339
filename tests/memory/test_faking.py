"""Cached results are what torch's fake tensors are: metadata, aliases and memory, and the same trace of whole steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.covering import sampled
from tests.train.models import TINY, TINY_ROUTED
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory import faking
from tightfit.memory.faking import Faking
from tightfit.memory.simulation import simulated
from tightfit.memory.trace import Trace
from tightfit.prove.rehearsal import trace_training_step

Make = Callable[[Tensor], Any]
OPERATIONS: dict[str, Make] = {
    "new": lambda x: x * 2,
    "of another dtype": lambda x: x > 0,
    "not contiguous": lambda x: x.t() + 1,
    "several": lambda x: x.max(dim=1),
    "in place": lambda x: x.add_(1),
    "view": lambda x: x.view(-1),
    "further on": lambda x: x[3:7, 1:5],
    "of a part": lambda x: x[2:].t()[1:].unsqueeze(0),
    "parts": lambda x: x.split(2),
    "as strided": lambda x: x[1:].as_strided((2, 2), (3, 1), 7),
    "bytes of a part": lambda x: x.view(-1)[4:20].view(torch.int16),
    "itself and new": lambda x: (x.mul_(2), x.sum()),
    "factory": lambda x: torch.zeros(3, 5),
    "like": lambda x: torch.empty_like(x.t()),
    "constant": lambda x: torch.tensor(3.0) * x,
    "matmul": lambda x: x @ x.t(),
    "into": lambda x: torch.empty(8, 6).copy_(x),
    "listed": lambda x: torch._foreach_mul([x, x.t()], 2.0),
}


def described(x: Tensor, made: Any) -> list[Any]:
    """All that a program can ask of the results, and whose memory they are in."""
    found: list[Any] = [type(made)]
    for part in made if isinstance(made, (tuple, list)) else (made,):
        assert isinstance(part, FakeTensor)
        shares = part.untyped_storage()._cdata == x.untyped_storage()._cdata
        found += [part.dtype, part.shape, part.stride(), part.storage_offset(), part.device, part.requires_grad]
        found += [part.untyped_storage().nbytes(), shares, part is x]
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_recipe_makes_what_torch_makes(name: str) -> None:
    make = OPERATIONS[name]
    with FakeTensorMode():
        x = torch.ones(8, 6)
        expected = described(x, make(x))
    faking._cached.clear()
    for _ in range(3):
        with simulated():
            x = torch.ones(8, 6)
            assert described(x, make(x)) == expected


def test_the_same_view_of_another_place_is_in_that_place() -> None:
    """The cache knows how far a view is from its argument, not where the argument is."""
    with simulated():
        x = torch.empty(4, 8, 2)
        for at in range(4):
            assert x[at][2:].storage_offset() == at * 16 + 4
            assert x[at].view(torch.int16).storage_offset() == at * 32
            assert x[at].as_strided((2,), (1,), 5).storage_offset() == 5


def test_results_of_one_recipe_share_nothing() -> None:
    with simulated():
        x = torch.empty(4)
        made = [x + 1 for _ in range(3)]
        assert len({part.untyped_storage()._cdata for part in (x, *made)}) == 4


def test_scalars_of_another_kind_are_another_recipe() -> None:
    """1, 1.0 and True are equal and have the same hash."""
    with simulated():
        whole = torch.empty(4, dtype=torch.int32)
        assert [(whole * factor).dtype for factor in (1, 1.0, True, 1.0)] == [
            torch.int32,
            torch.float32,
            torch.int32,
            torch.float32,
        ]
        made = []
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            made.append(torch.zeros(2).dtype)
        assert made == [torch.float32, torch.float64, torch.float32]


def test_what_is_read_is_one() -> None:
    with simulated():
        assert torch.zeros(1).item() == 1.0
        assert torch.zeros(1, dtype=torch.long).item() == 1
        assert bool(torch.zeros(1, dtype=torch.bool))


CASES: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (TINY, {}, {}, "bf16"),
    (TINY, {}, {"checkpoint_every": 1, "checkpoint_keep": "matmuls", "loss": "plain"}, "fp32"),
    (TINY, {}, {"checkpoint_every": 1, "offload": "weights", "update_in_backward": True}, "bf16"),
    (TINY_ROUTED, {"data": 4, "zero": 3}, {"checkpoint_every": 1}, "bf16"),
    (TINY, {"tensor": 2, "data": 2}, {"optimizer_states": "bf16"}, "pure-bf16"),
    (TINY, {"pipeline": 2, "micro_batch": 1}, {}, "bf16"),
]


def rehearsal(spec: Any, layout: dict[str, Any], levers: dict[str, Any], precision: Any) -> Trace:
    given = Layout.model_validate({"micro_batch": 2, **layout})
    batch = given.micro_batch * given.data * given.pipeline
    workload = Workload(spec=spec, sequence_length=32, global_batch=batch, precision=precision)
    return trace_training_step(workload, given, Levers.model_validate(levers))


@sampled(3)
@pytest.mark.parametrize(("spec", "layout", "levers", "precision"), CASES)
def test_a_step_from_cached_results_is_the_step(
    spec: Any, layout: dict[str, Any], levers: dict[str, Any], precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every allocation and free, in order and with its owner, as where torch answers each operation itself."""
    with monkeypatch.context() as patched:
        patched.setattr(Faking, "_run", lambda self, *call: self.dispatch(*call))
        expected = rehearsal(spec, layout, levers, precision)
    faking._cached.clear()
    for _ in range(2):
        found = rehearsal(spec, layout, levers, precision)
        assert found.events == expected.events
        assert found.allocations == expected.allocations
        assert (found.starts, found.step_start) == (expected.starts, expected.step_start)
    assert len(expected.events) > 100
