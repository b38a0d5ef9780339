"""A pipeline without a flush trains as its recurrence says: w(t + 1) = w(t) − ν ∇f(w(t − 1)), on every rank alike.

The reference is one process that computes gradients with weights of one update before, written without anything of
what the pipeline does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.covering import covering, sampled, thorough
from tests.distributed.group import Group
from tests.distributed.parts import held
from tests.distributed.piping import DEEP, Piped
from tests.distributed.test_equivalence import assert_same
from tests.distributed.training import (
    CPU,
    Case,
    Share,
    Trace,
    build,
    gradients,
    mesh_of,
    micro_batches,
    parameters,
    run_rank,
    together,
    truth,
)
from tests.train.models import TINY_ROUTED
from tightfit.jobs.job import Optimizer, PrecisionName
from tightfit.jobs.layout import PipelineSchedule
from tightfit.jobs.levers import Levers
from tightfit.parallel.ranks import Ranks
from tightfit.parallel.weight_versions import WeightVersions
from tightfit.train.precision import LossScale
from tightfit.train.step import NotFiniteError, ignore, train_step

Make = Callable[[int], Group]
STEPS = 4
CLIPPED = Optimizer(lr=1e-3, eps=1e-4, clip_norm=0.1)
DEEP_TIED = replace(DEEP, tied=True)


@dataclass(frozen=True)
class Unflushed(Piped):
    """Steps of a pipeline, which runs empty after those of `flushed` and after the last one."""

    steps: int = STEPS
    schedule: PipelineSchedule = "2bw"
    flushed: tuple[int, ...] = ()


CASES = {
    "two": Unflushed(),
    "as-many-micro-batches-as-ranks": Unflushed(pipeline=4),
    "four": Unflushed(pipeline=4, micro_batch=1),
    "three-micro-batches": Unflushed(rows=12, micro_batch=4),
    "clipped": Unflushed(pipeline=4, settings=CLIPPED),
    "clipped-tied": Unflushed(spec=DEEP_TIED, settings=CLIPPED),
    "tied-of-four": Unflushed(spec=DEEP_TIED, pipeline=4, micro_batch=1),
    "data": Unflushed(data=2, micro_batch=1),
    "data-clipped-tied": Unflushed(spec=DEEP_TIED, data=2, micro_batch=1, settings=CLIPPED),
    "checkpointed": Unflushed(levers=Levers(checkpoint_every=1)),
    "tiled": Unflushed(levers=Levers(tiles=2)),
    "tensor": Unflushed(tensor=2),
    "flushed-now-and-then": Unflushed(pipeline=4, steps=6, flushed=(1, 4)),
}


@sampled(3)
@pytest.mark.parametrize("name", covering(CASES))
def test_losses_gradients_and_weights_are_those_of_the_recurrence(group: Make, name: str) -> None:
    case = CASES[name]
    found = group(case.layout.ranks).run(run_unflushed, case)
    assert all(share.results == found[0].results for share in found)
    assert len(found[0].results) == case.steps
    assert_same(together(found), delayed(alone(case)))


@pytest.mark.parametrize("precision", [thorough("fp32"), "bf16"])
def test_when_a_pipeline_runs_empty_changes_no_bit(group: Make, precision: PrecisionName) -> None:
    """Nor does a step between two flushes, as `train_step` makes it."""
    case = Unflushed(spec=DEEP_TIED, precision=precision, states=True, steps=4)
    flowing = together(group(2).run(run_unflushed, case))
    for other in (group(2).run(run_unflushed, replace(case, flushed=(1,))), group(2).run(run_rank, case)):
        stopping = together(other)
        assert flowing.results == stopping.results
        assert flowing.states.keys() == stopping.states.keys()
        assert any(name.startswith("older/") for name in flowing.states)
        assert all(stopping.states[name].equal(state) for name, state in flowing.states.items())
        assert all(stopping.last[name].equal(weight) for name, weight in flowing.last.items())


def test_routed_layers_count_their_balance_by_tokens(group: Make) -> None:
    """Balance is not linear in rows, so the truth here takes the same micro-batches one after another."""
    case = Unflushed(spec=replace(TINY_ROUTED, layers=5))
    exact = delayed(replace(alone(case), micro_batch=case.micro_batch))
    assert_same(together(group(2).run(run_unflushed, case)), exact)


@pytest.mark.parametrize("fault", ["newest", "older"])
def test_a_comparison_finds_a_version_that_is_not_the_recurrences(group: Make, fault: str) -> None:
    """Forward passes with newer weights, or backward passes with other ones than forward."""
    case = Unflushed(steps=3)
    with pytest.raises(AssertionError):
        assert_same(together(group(2).run(run_with_fault, case, fault)), delayed(alone(case)))


def run_with_fault(case: Unflushed, fault: str) -> Share:
    original = WeightVersions.use
    fixed = {"newest": lambda self, version: original(self, self.newest), "older": lambda self, version: None}
    WeightVersions.use = fixed[fault]  # type: ignore[method-assign]
    try:
        return run_unflushed(case)
    finally:
        WeightVersions.use = original  # type: ignore[method-assign]


def test_the_recurrence_is_not_that_of_other_schedules() -> None:
    case = alone(Unflushed(steps=3))
    apart, undelayed = delayed(case), truth(case)
    assert apart.results[0] == undelayed.results[0]
    assert apart.results[1].loss != undelayed.results[1].loss


@pytest.mark.parametrize("bad", [0, 1])
def test_a_loss_that_is_not_finite_stops_all_stages_before_its_update(group: Make, bad: int) -> None:
    """The second of three steps is bad, and known when the third has been entered."""
    assert group(2).run(steps_with_a_bad_one, Unflushed(), bad) == ["the loss is nan"] * 2


def steps_with_a_bad_one(case: Unflushed, bad: int) -> str:
    mesh = mesh_of(case.layout)
    ranks = Ranks.of(mesh)
    decoder, _, optimizer = build(case, mesh)
    buffered = optimizer.buffered
    assert buffered is not None
    layer: Any = next(iter(decoder.layers))
    factors = iter([1.0] * 4 + [float("nan")] * 4 + [1.0] * 4)
    if mesh.get_local_rank("pipeline") == bad:
        layer.mlp.register_forward_hook(lambda _, __, made: (made[0] * next(factors), made[1]))
    told = [buffered.take(micro_batches(case, step, 0), CPU, 1e-3, ignore, ranks) for step in range(2)]
    assert told[0] is None
    assert told[1] is not None
    before = [parameter.detach().clone() for parameter in buffered.model.versions.newest]
    try:
        buffered.take(micro_batches(case, 2, 0), CPU, 1e-3, ignore, ranks)
    except NotFiniteError as error:
        assert all(map(torch.equal, before, buffered.model.versions.newest))
        return str(error)
    return "nothing was wrong"


def test_fewer_micro_batches_than_ranks_get_a_sentence(group: Make) -> None:
    with pytest.raises(AssertionError, match=r"2bw, whose 2 ranks .* but a step has 1; make global_batch"):
        group(2).run(run_unflushed, Unflushed(micro_batch=8))


def run_unflushed(case: Unflushed) -> Share:
    """As the training loop does: a step is told when the next one has been taken, or the pipeline has run empty."""
    mesh = mesh_of(case.layout)
    ranks = Ranks.of(mesh)
    decoder, _, optimizer = build(case, mesh)
    share, buffered = Share(held(parameters(decoder))), optimizer.buffered
    assert buffered is not None

    def look(phase: str) -> None:
        if phase == "optimizer":
            share.gradients.append(held(gradients(decoder)))

    for step in range(case.steps):
        batches = micro_batches(case, step, ranks.rank)
        told = [buffered.take(batches, CPU, case.settings.lr, look, ranks)]
        if step in case.flushed or step == case.steps - 1:
            told.append(buffered.finish(look, ranks))
        share.results += [result for result in told if result is not None]
    share.last = held(parameters(decoder))
    share.states = held(optimizer.state()) if case.states else None
    return share


def alone(case: Unflushed) -> Case:
    whole = case.whole()
    return Case(
        spec=whole.spec, rows=whole.rows, steps=whole.steps, micro_batch=whole.micro_batch, settings=case.settings
    )


@cache
def delayed(case: Case) -> Trace:
    """One process: gradients with the weights of one update before, the update to the newest ones."""
    decoder, module, optimizer = build(case, None)
    share, older = Share(held(parameters(decoder))), copied(decoder)

    for step in range(case.steps):
        newest = copied(decoder)
        set_weights(decoder, older)

        def look(phase: str) -> None:
            if phase == "optimizer":
                share.gradients.append(held(gradients(decoder)))
                set_weights(decoder, newest)  # noqa: B023

        result = train_step(module, optimizer, micro_batches(case, step, 0), CPU, case.settings.lr, LossScale(), look)
        share.results.append(result)
        older = newest
    share.last = held(parameters(decoder))
    return together([share])


def copied(decoder: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in decoder.parameters()]


@torch.no_grad()
def set_weights(decoder: torch.nn.Module, values: list[torch.Tensor]) -> None:
    for parameter, value in zip(decoder.parameters(), values, strict=True):
        parameter.copy_(value)
