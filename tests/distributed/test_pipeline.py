"""The ranks of a pipeline train as one process does: losses, norms, every gradient, every weight, step after step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.covering import covering, sampled
from tests.distributed.group import Group
from tests.distributed.piping import DEEP, Piped
from tests.distributed.test_equivalence import assert_same, distance
from tests.distributed.training import (
    CPU,
    GEMMA,
    GPT2,
    Share,
    build,
    mesh_of,
    micro_batches,
    run_rank,
    together,
    truth,
)
from tests.train.models import TINY_ROUTED
from tightfit.errors import UserError
from tightfit.jobs.job import Optimizer, PrecisionName
from tightfit.jobs.layout import Layout, PipelineSchedule
from tightfit.jobs.levers import Levers, StateFormat
from tightfit.jobs.rules.refusals import refused_by_trainer
from tightfit.jobs.rules.rule import Run
from tightfit.parallel.pipeline import Pipeline
from tightfit.parallel.pipeline_stage import spans_of
from tightfit.parallel.ranks import Ranks
from tightfit.train.precision import LossScale
from tightfit.train.step import NotFiniteError, train_step

Make = Callable[[int], Group]
DEEP_TIED = replace(DEEP, tied=True)
CLIPPED = Optimizer(lr=1e-3, eps=1e-4, clip_norm=0.1)
SCHEDULES: tuple[PipelineSchedule, ...] = ("gpipe", "1f1b", "zero-bubble")
CASES = {
    "gpipe": Piped(schedule="gpipe"),
    "naive": Piped(schedule="gpipe", micro_batch=8),
    "1f1b": Piped(),
    "1f1b-three-micro-batches": Piped(rows=12, micro_batch=4),
    "1f1b-fewer-micro-batches-than-ranks": Piped(pipeline=4, micro_batch=4),
    "interleaved": Piped(schedule="interleaved", stages_per_rank=2),
    "zero-bubble": Piped(schedule="zero-bubble"),
    "zero-bubble-four": Piped(pipeline=4, micro_batch=1, schedule="zero-bubble"),
    "zb-v": Piped(schedule="zb-v", stages_per_rank=2),
    "zb-v-four-tied": Piped(
        spec=replace(DEEP_TIED, layers=8), pipeline=4, micro_batch=1, schedule="zb-v", stages_per_rank=2
    ),
    "data-zero-1-zb-v": Piped(data=2, zero=1, micro_batch=1, schedule="zb-v", stages_per_rank=2),
    "1f1b-four": Piped(pipeline=4, micro_batch=1),
    **{f"{schedule}-tied": Piped(spec=DEEP_TIED, schedule=schedule) for schedule in SCHEDULES if schedule != "1f1b"},
    "interleaved-tied": Piped(spec=DEEP_TIED, schedule="interleaved", stages_per_rank=2),
    **{
        f"{schedule}-checkpointed": Piped(schedule=schedule, levers=Levers(checkpoint_every=1))
        for schedule in SCHEDULES[:2]
    },
    "interleaved-checkpointed": Piped(
        schedule="interleaved", stages_per_rank=2, levers=Levers(checkpoint_every=2, loss_chunk_bytes=1)
    ),
    "clipped": Piped(pipeline=4, settings=CLIPPED),
    "clipped-tied": Piped(spec=DEEP_TIED, settings=CLIPPED),
    "plain-loss": Piped(levers=Levers(loss="plain")),
    "small-loss-chunks": Piped(levers=Levers(loss_chunk_bytes=1)),
    "tiled": Piped(levers=Levers(tiles=2)),
    "gemma": Piped(spec=replace(GEMMA, layers=5)),
    "learned-positions": Piped(spec=replace(GPT2, layers=5)),
    "data-zero-0": Piped(data=2, micro_batch=1),
    **{
        f"data-zero-{zero}-clipped-tied": Piped(spec=DEEP_TIED, data=2, zero=zero, micro_batch=1, settings=CLIPPED)
        for zero in (0, 1)
    },
    "data-zero-1-interleaved": Piped(data=2, zero=1, micro_batch=1, schedule="interleaved", stages_per_rank=2),
    "data-zero-1-zero-bubble": Piped(data=2, zero=1, micro_batch=1, schedule="zero-bubble"),
    "data-zero-1-checkpointed": Piped(data=2, zero=1, micro_batch=1, levers=Levers(checkpoint_every=2)),
    "data-zero-0-zero-bubble": Piped(data=2, micro_batch=1, schedule="zero-bubble"),
    "tensor": Piped(tensor=2, sequence_parallel=False),
    "tensor-sequence-zero-bubble": Piped(tensor=2, schedule="zero-bubble"),
    "tensor-sequence-checkpointed": Piped(tensor=2, levers=Levers(checkpoint_every=1)),
    "tensor-interleaved": Piped(tensor=2, schedule="interleaved", stages_per_rank=2),
    "tensor-clipped-tied": Piped(tensor=2, spec=DEEP_TIED, schedule="gpipe", settings=CLIPPED),
    "tensor-data-zero-1": Piped(spec=replace(DEEP, layers=3), tensor=2, data=2, zero=1),
    "tensor-data-zero-0-tied": Piped(spec=replace(DEEP_TIED, layers=3), tensor=2, data=2),
}


@sampled(5)
@pytest.mark.parametrize("name", covering(CASES))
def test_a_pipeline_trains_as_one_process_does(group: Make, name: str) -> None:
    case = CASES[name]
    found = group(case.layout.ranks).run(run_rank, case)
    assert all(share.results == found[0].results for share in found)
    assert_same(together(found), truth(case.whole()))


@sampled(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_routed_layers_count_their_balance_by_tokens(group: Make, schedule: PipelineSchedule) -> None:
    """Balance is not linear in rows, so the truth here takes the same micro-batches one after another."""
    case = Piped(spec=replace(TINY_ROUTED, layers=5), schedule=schedule)
    exact = truth(replace(case.whole(), micro_batch=case.micro_batch))
    assert_same(together(group(2).run(run_rank, case)), exact)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_are_as_near_the_truth_as_on_one_process(group: Make, precision: PrecisionName) -> None:
    case = Piped(micro_batch=4, steps=1, precision=precision, states=True)
    one = replace(case.whole(), micro_batch=case.micro_batch)
    exact, alone = truth(replace(one, precision="fp32")), truth(one)
    found = together(group(2).run(run_rank, case))
    scale = LossScale.for_precision(precision).value
    for name, gradient in exact.gradients[0].items():
        ours, theirs = (distance(trace.gradients[0][name].float() / scale, gradient) for trace in (found, alone))
        assert 0 < ours < 1.2 * theirs + 1e-3, name
    assert {name: t.dtype for name, t in found.states.items()} == {name: t.dtype for name, t in alone.states.items()}
    assert alone.states


def test_whole_gradients_of_micro_batches_are_summed_in_float32(group: Make) -> None:
    """As without a pipeline: the same 16-bit gradients, of which float32 sums differ by less than 16 bits can tell."""
    case = Piped(data=2, zero=1, micro_batch=1, schedule="gpipe", precision="bf16", steps=1)
    piped = together(group(4).run(run_rank, case))
    without = together(group(2).run(run_rank, replace(case, pipeline=1, schedule="1f1b")))
    for name, gradient in without.gradients[0].items():
        assert distance(piped.gradients[0][name], gradient) < 1e-5, name


@sampled(3)
@pytest.mark.parametrize("form", ["8bit", "bf16", "factored"])
def test_optimizer_states_are_those_of_one_process(group: Make, form: StateFormat) -> None:
    case = Piped(spec=DEEP_TIED, steps=2, levers=Levers(optimizer_states=form), states=True)
    found, exact = together(group(2).run(run_rank, case)), truth(replace(case.whole(), levers=case.levers))
    assert found.states.keys() == exact.states.keys()
    assert exact.states
    for name, weight in exact.last.items():
        assert distance(found.last[name], weight) < 1e-3, name


def test_fp16_overflow_is_skipped_by_all_stages_together(group: Make) -> None:
    found = group(2).run(run_rank, Piped(micro_batch=4, steps=1, precision="fp16", scale=2.0**30))
    assert [share.results[0].skipped for share in found] == [True, True]
    both = together(found)
    assert all(both.last[name].equal(weight) for name, weight in both.first.items())


@pytest.mark.parametrize("bad", [0, 1])
def test_a_loss_that_is_not_finite_stops_all_stages(group: Make, bad: int) -> None:
    assert group(2).run(step_with_one_bad_stage, Piped(), bad) == ["the loss is nan"] * 2


def step_with_one_bad_stage(case: Piped, bad: int) -> str:
    mesh = mesh_of(case.layout)
    ranks = Ranks.of(mesh)
    decoder, module, optimizer = build(case, mesh)
    if mesh.get_local_rank("pipeline") == bad:
        layer: Any = next(iter(decoder.layers))
        layer.mlp.register_forward_hook(lambda _, __, made: (made[0] * float("nan"), made[1]))
    try:
        train_step(module, optimizer, micro_batches(case, 0, ranks.rank), CPU, 1e-3, LossScale(), ranks=ranks)
    except NotFiniteError as error:
        return str(error)
    return "nothing was wrong"


def test_a_comparison_finds_a_tied_gradient_that_is_not_exchanged(group: Make) -> None:
    case = Piped(spec=DEEP_TIED)
    with pytest.raises(AssertionError):
        assert_same(together(group(2).run(run_without_exchange, case)), truth(case.whole()))


def run_without_exchange(case: Piped) -> Share:
    original = Pipeline._exchange_tied
    Pipeline._exchange_tied = lambda self: None  # type: ignore[method-assign]
    try:
        return run_rank(case)
    finally:
        Pipeline._exchange_tied = original  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("layout", "levers", "words"),
    [
        ({"data": 2, "zero": 2}, {}, "sends gradients and weights at each of a pipeline's micro-batches"),
        ({"data": 2, "zero": 3}, {}, "set layout.zero to 1"),
        ({}, {"update_in_backward": True}, "micro-batches add theirs up"),
        ({"schedule": "zero-bubble"}, {"checkpoint_every": 1}, "take 1f1b"),
        ({"schedule": "zero-bubble"}, {"tiles": 2}, "take 1f1b"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(layout: dict[str, Any], levers: dict[str, Any], words: str) -> None:
    split = Layout.model_validate({"pipeline": 2} | layout)
    sentence = refused_by_trainer(Run(layout=split, levers=Levers.model_validate(levers), precision="bf16"))
    assert sentence is not None
    assert words in sentence


def test_schedules_in_rounds_want_equal_ones() -> None:
    layout = Layout(pipeline=2, schedule="interleaved", stages_per_rank=2)
    assert refused_by_trainer(Run(layout=layout, levers=Levers(), accumulation=4)) is None
    assert "multiple of layout.pipeline (2)" in str(
        refused_by_trainer(Run(layout=layout, levers=Levers(), accumulation=5))
    )


def test_more_stages_than_layers_get_a_sentence() -> None:
    with pytest.raises(UserError, match=r"the pipeline has 8 stages .* but the model has 5 layers"):
        spans_of(DEEP, Layout(pipeline=8), 0, 16)
