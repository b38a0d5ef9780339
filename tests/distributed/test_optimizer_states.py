"""Formats of the optimizer's states over ranks: from the same gradients the bits of one process, whole when saved."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.covering import sampled, thorough
from tests.distributed.group import Group
from tests.distributed.parts import Parts, held, united
from tests.distributed.training import UNEVEN, Case, build, mesh_of, run_rank, together, truth
from tightfit.collectives.shards import is_shard, like_shard, local
from tightfit.jobs.levers import Levers

Make = Callable[[int], Group]
EIGHT = Levers(optimizer_states="8bit")
CASES = {
    "8bit": Case(spec=UNEVEN, data=4, zero=3, levers=EIGHT),
    "8bit-masters": Case(spec=UNEVEN, data=4, zero=2, levers=EIGHT, precision="bf16"),
    "bf16-moments": Case(spec=UNEVEN, data=4, zero=1, levers=Levers(optimizer_states="bf16")),
    "8bit-stochastic": Case(
        data=4, zero=3, levers=Levers(optimizer_states="8bit", rounding="stochastic"), precision="pure-bf16"
    ),
}


def steps(case: Case, saved: dict[str, Tensor] | None = None) -> Parts:
    """What is here of weights and states after two updates (after `saved`) with gradients that all know."""
    decoder, _, optimizer = build(case, mesh_of(case.layout) if case.data > 1 else None)
    if saved is not None:
        optimizer.load_state(saved, "a file")
    for step in range(2):
        for number, (_, p) in enumerate(decoder.named_parameters()):
            generator = torch.Generator().manual_seed(100 * step + number)
            give(p, torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype))
        optimizer.step(1e-2)
    narrow = case.precision != "fp32"  # shards of a run in bf16 are float32: the model computes with them narrowed
    weights = {n: p.detach().to(torch.bfloat16 if narrow else p.dtype) for n, p in decoder.named_parameters()}
    return held(weights | optimizer.state())


def give(p: torch.nn.Parameter, gradient: Tensor) -> None:
    """As backward leaves it; a shard gets its rows."""
    if not is_shard(p):
        p.grad = gradient
        return
    rows = -(-p.shape[0] // p.device_mesh.size())
    first = min(p.device_mesh.get_local_rank() * rows, p.shape[0])
    p.grad = like_shard(gradient[first : first + local(p).shape[0]].clone(), p)


@sampled(3)
@pytest.mark.parametrize("name", [thorough("8bit"), *list(CASES)[1:]])
def test_shards_are_updated_to_the_bits_of_one_process(group: Make, name: str) -> None:
    case = CASES[name]
    alone = replace(case, data=1, zero=0)
    found, expected = united(group(4).run(steps, case)), united([steps(alone)])
    assert found.keys() == expected.keys()
    assert [n for n, t in expected.items() if not torch.equal(found[n], t)] == []
    states = {n: t for n, t in expected.items() if "/" in n}
    again, expected = united(group(4).run(steps, case, states)), united([steps(alone, states)])
    assert [n for n, t in expected.items() if not torch.equal(again[n], t)] == []


@sampled(2)
@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_train_in_eight_bits_as_one_process_does(group: Make, zero: int) -> None:
    case = Case(data=2, zero=zero, micro_batch=2, levers=EIGHT)
    found, exact = together(group(2).run(run_rank, case)), truth(replace(case, data=1, zero=0))
    assert [r.loss for r in found.results] == pytest.approx([r.loss for r in exact.results], rel=1e-4)
    for name, weight in exact.last.items():
        moved = (weight - exact.first[name]).norm()
        assert (found.last[name] - weight).norm() <= 0.01 * moved, name
