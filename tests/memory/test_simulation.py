"""The rehearsed step: states exact to the byte, equal to a real step on the CPU, deep models from shallow ones.

Nothing here has a GPU's word for it; benchmarks/results/memory_truth.csv has (see test_truth.py).
"""

from collections import Counter
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from benchmarks.reports.documentation import ROOT
from tests.covering import covering, sampled
from tests.speed import within_turns
from tests.train.models import TINY, TINY_ROUTED
from tightfit.errors import UserError
from tightfit.jobs.job import PrecisionName
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.allocator import PlainAllocator
from tightfit.memory.extrapolation import extrapolated
from tightfit.memory.formulas.overheads import DEFAULT, INSTALLED
from tightfit.memory.formulas.training import training_ledger
from tightfit.memory.ledger import Component, Ledger, Phase
from tightfit.memory.measurement import measured
from tightfit.memory.simulation import fake_world, simulated
from tightfit.memory.trace import Allocation, PhasePeak, Trace
from tightfit.models.decoder import Decoder, Implementations
from tightfit.models.presets import preset
from tightfit.models.spec import ModelSpec
from tightfit.parallel.mesh import make_mesh
from tightfit.prove import rehearsal
from tightfit.prove.rehearsal import CPU, build, claim_tensors, rehearse, trace_training_step
from tightfit.train.step import NotFiniteError

ODD = replace(TINY, vocab_size=101, mlp_size=52)
"""Rows that 8 ranks cannot share evenly: the first rank's shard is one of the larger ones."""
WORLD = 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "ddp": {"data": WORLD},
    "zero 1": {"data": WORLD, "zero": 1},
    "zero 2": {"data": WORLD, "zero": 2},
    "zero 3": {"data": WORLD, "zero": 3},
}


def asked(
    spec: ModelSpec, layout: dict[str, Any], levers: dict[str, Any], precision: PrecisionName = "bf16", length: int = 32
) -> tuple[Workload, Layout, Levers]:
    given = Layout.model_validate({"micro_batch": 2, **layout})
    batch = given.micro_batch * given.data
    workload = Workload(spec=spec, sequence_length=length, global_batch=batch, precision=precision)
    return workload, given, Levers.model_validate(levers)


def alive_at(trace: Trace, phase: Phase) -> Counter[Component]:
    """Bytes by component just before the first `phase`, by walking the events."""
    seen = trace.events[: next(at for at, begun in trace.starts if begun == phase)]
    freed = {~event for event in seen if event < 0}
    held: Counter[Component] = Counter()
    for event in seen:
        if event >= 0 and event not in freed:
            held[trace.allocations[event].component] += trace.allocations[event].bytes
    return held


def parameters(spec: ModelSpec, ranks: int = 1) -> int:
    """Parameters that the first of `ranks` holds, each split by rows as evenly as can be."""
    with torch.device("meta"):
        model = Decoder(spec)
    return sum(-(-p.shape[0] // ranks) * (p.numel() // p.shape[0]) for p in model.parameters())


PRECISIONS: tuple[PrecisionName, ...] = ("bf16", "fp16", "fp32", "pure-bf16")


@sampled(2)
@pytest.mark.parametrize(("layout", "precision"), covering(list(product(LAYOUTS.values(), PRECISIONS))))
def test_states_are_exact(layout: dict[str, Any], precision: PrecisionName) -> None:
    """Between backward and the update, to the byte; beside weights there are a batch, the loss and a few counts."""
    workload, given, levers = asked(ODD, layout, {}, precision)
    held = alive_at(trace_training_step(workload, given, levers), "optimizer")
    P = parameters(ODD, given.data if given.zero else 1)
    mixed = precision in ("bf16", "fp16")
    width = 4 if precision == "fp32" else 2
    assert held["master weights"] == (4 * P if mixed else 0)
    assert held["optimizer states"] == 2 * P * (4 if mixed else width)
    weights = 0 if mixed and given.zero else width * P
    gradients = P * (4 if mixed and given.zero else width)
    with torch.device("meta"):
        counters = 4 * len(list(Decoder(ODD).parameters()))
    tokens = 8 * given.micro_batch * workload.sequence_length
    scalars = counters + 4 + (8 if given.data > 1 else 0)  # Adam's step numbers, the loss, all ranks' count of tokens
    others = held.total() - held["master weights"] - held["optimizer states"] - held["workspace"]
    assert others == weights + gradients + tokens + scalars
    if given.data == 1 or given.zero:
        assert held["gradients"] == gradients


@pytest.mark.parametrize("spec", [TINY_ROUTED, replace(ODD, tied=True)], ids=["routed", "tied"])
@pytest.mark.parametrize("zero", [0, 3])
def test_states_of_other_models_are_exact(spec: ModelSpec, zero: int) -> None:
    workload, given, levers = asked(spec, {"data": WORLD, "zero": zero}, {})
    held = alive_at(trace_training_step(workload, given, levers), "optimizer")
    P = parameters(spec, WORLD if zero else 1)
    assert (held["master weights"], held["optimizer states"]) == (4 * P, 8 * P)


PLAIN = Implementations(attention="eager", linear_cross_entropy="torch", norm="torch", rope="torch", glu="torch")
"""Operations that are the same on fake tensors and on the CPU's."""


def plain_moments(tracing: AbstractContextManager[Any], question: tuple[Workload, Layout, Levers]) -> list[PhasePeak]:
    """The fullest moments of one step by bytes of tensors, fake or real."""
    workload, layout, levers = question
    with ExitStack() as stack:
        mesh = None
        if layout.ranks > 1:
            stack.enter_context(fake_world(layout.ranks))
            mesh = make_mesh(layout, "cpu")
        entered = stack.enter_context(tracing)
        tracer = getattr(entered, "tracer", entered)
        program = build(workload, layout, levers, CPU, PLAIN, mesh, tracer)
        claim_tensors(tracer, program.decoder, program.optimizer)
        try:
            program.step(tracer.begin)
        except NotFiniteError:  # real shards whose other ranks are fake hold whatever was in memory
            assert layout.zero
    return tracer.trace.replay(PlainAllocator(), steps=1).peaks


def by_component(moment: PhasePeak) -> dict[Component, int]:
    held: Counter[Component] = Counter()
    for allocation in moment.alive:
        held[allocation.component] += allocation.bytes
    return dict(held)


def tensors(moment: PhasePeak) -> dict[Component, int]:
    """Components without those that are a mere number, such as a norm that is left from the step before."""
    return {component: held for component, held in by_component(moment).items() if held > 8}


@sampled(2)
@pytest.mark.parametrize(
    ("layout", "levers", "precision", "phases"),
    [
        ({}, {"loss": "plain"}, "fp32", ("init", "forward", "loss", "backward", "optimizer")),
        ({}, {"loss": "plain", "checkpoint_every": 1}, "fp32", ("init", "forward", "loss", "backward", "optimizer")),
        ({}, {"loss": "plain"}, "bf16", ("init", "forward", "loss", "backward", "optimizer")),
        ({}, {"loss": "fused"}, "fp32", ("init", "forward", "backward", "optimizer")),
        ({"data": 2}, {"loss": "plain"}, "fp32", ("init", "forward", "loss", "backward", "optimizer")),
        ({"data": 2, "zero": 1}, {"loss": "plain"}, "fp32", ("init", "forward", "loss", "backward")),
        ({"data": 2, "zero": 3}, {"loss": "plain"}, "fp32", ("init", "forward", "loss", "backward")),
    ],
)
def test_a_real_step_holds_what_the_simulated_one_says(
    layout: dict[str, Any], levers: dict[str, Any], precision: PrecisionName, phases: tuple[Phase, ...]
) -> None:
    """On the CPU, byte for byte and component for component, at the fullest moment of each phase.

    Left out: the fused loss itself, whose inner tensors only the simulation declares; and the update of real shards,
    whose gradients a fake group leaves undefined.
    """
    question = asked(ODD, layout, levers, precision)
    said = {moment.phase: moment for moment in plain_moments(simulated(), question)}
    found = {moment.phase: moment for moment in plain_moments(measured(CPU), question)}
    for phase in phases:
        assert said[phase].allocated_bytes == found[phase].allocated_bytes, phase
        assert by_component(said[phase]) == by_component(found[phase]), phase


TWELVE = replace(preset("llama-3.2-1b"), layers=12)


@sampled(2)
@pytest.mark.parametrize(
    ("layout", "levers", "precision"),
    [
        ({}, {}, "bf16"),
        ({}, {"checkpoint_every": 2}, "pure-bf16"),
        ({"data": 8}, {"loss": "plain"}, "bf16"),
        ({"data": 8, "zero": 1}, {}, "bf16"),
        ({"data": 8, "zero": 3}, {"checkpoint_every": 1}, "bf16"),
    ],
)
def test_a_deep_model_is_what_two_shallow_ones_say(
    layout: dict[str, Any], levers: dict[str, Any], precision: PrecisionName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of every component to 0.1 %, what the allocator makes of them to 0.3 %, at every phase of the step."""
    question = asked(TWELVE, layout, levers, precision, length=1024)
    whole = _of_depth(monkeypatch, 12, question)
    grown = _of_depth(monkeypatch, 0, question)
    assert {moment.phase for moment in grown} == {moment.phase for moment in whole}
    for phase, moment in ((moment.phase, moment) for moment in whole):
        other = next(moment for moment in grown if moment.phase == phase)
        if phase != "init":  # a model is sharded piece by piece, fullest at any of them
            assert tensors(other) == pytest.approx(tensors(moment), rel=1e-3), phase
        within = 1e-2 if phase == "init" else 3e-3  # with what rounding to blocks adds
        assert other.allocated_bytes == pytest.approx(moment.allocated_bytes, rel=within), phase


def _of_depth(
    monkeypatch: pytest.MonkeyPatch, direct_layers: int, question: tuple[Workload, Layout, Levers]
) -> list[PhasePeak]:
    """Moments of the model, traced whole up to `direct_layers` layers; a shallow trace must really be shallow."""
    traced: list[int] = []

    def counted(workload: Workload, *others: Any) -> Trace:
        traced.append(workload.spec.layers)
        return trace_training_step(workload, *others)

    monkeypatch.setattr(rehearsal, "DIRECT_LAYERS", direct_layers)
    monkeypatch.setattr(rehearsal, "trace_training_step", counted)
    moments = rehearsal._replay(*question, DEFAULT).peaks
    monkeypatch.undo()
    assert (traced == [12]) if direct_layers else (len(traced) == 2 and max(traced) < 12)
    return moments


def test_cublas_takes_its_workspaces_at_the_first_products() -> None:
    """One of forward's thread and one of autograd's, after the embedding and after the loss, and once in a run."""
    workload = Workload(spec=TINY, sequence_length=64, global_batch=1, precision="bf16")
    trace = trace_training_step(workload, Layout(), Levers())
    taken = [
        (at, trace.allocations[event].bytes)
        for at, event in enumerate(trace.events)
        if event >= 0 and trace.allocations[event].detail == "cuBLAS"
    ]
    assert [size for _, size in taken] == [DEFAULT.workspace_bytes // 2] * 2
    phases = [[phase for start, phase in trace.starts if start <= at][-1] for at, _ in taken]
    assert phases == ["forward", "backward"]
    assert all(trace.allocations[trace.events[at]].once for at, _ in taken)
    in_forward = [each for each in trace.events[trace.step_start : taken[0][0]] if each >= 0]
    assert any(trace.allocations[each].module == "embed" for each in in_forward)


def test_405b_on_1024_ranks_is_a_matter_of_seconds() -> None:
    spec = preset("llama-3.1-405b")
    workload = Workload(spec=spec, sequence_length=8192, global_batch=1024)
    with within_turns(500):
        ledger = rehearse(workload, Layout(data=1024, zero=3, micro_batch=1), Levers(checkpoint_every=1))
    P = parameters(spec, 1024)
    held = ledger.by_component("loss")
    assert (held["master weights"], held["optimizer states"]) == (4 * P, 8 * P)
    checkpoints = 2 * 8192 * spec.hidden_size * spec.layers
    assert checkpoints < held["activations"] < 1.1 * checkpoints
    layout, levers = Layout(data=1024, zero=3, micro_batch=1), Levers(checkpoint_every=1)
    formula = training_ledger(workload, layout, levers, INSTALLED)
    assert formula.peak_allocated_bytes() == pytest.approx(ledger.peak_allocated_bytes(), rel=0.01)
    used, held_gib = (f"{count / 2**30:.0f}" for count in (ledger.peak_allocated_bytes(), ledger.peak_reserved_bytes()))
    said = f"{used} GiB in use by formula and by rehearsal alike, and {held_gib} GiB held"
    assert said in " ".join((ROOT / "docs" / "scale.md").read_text(encoding="utf-8").split())


FOUR = replace(preset("llama-3.2-1b"), layers=4)


def ledger(layout: dict[str, Any] | None = None, length: int = 1024, spec: ModelSpec = FOUR, **levers: Any) -> Ledger:
    return rehearse(*asked(spec, layout or {}, levers, length=length))


def test_levers_never_add_what_they_are_there_to_save() -> None:
    kept = [ledger(checkpoint_every=every).by_component("loss")["activations"] for every in (1, 2, 4, 0)]
    assert all(less < more for less, more in pairwise(kept))
    fused, plain = ledger(loss="fused"), ledger(loss="plain")
    assert fused.peak_allocated_bytes() < plain.peak_allocated_bytes()
    assert plain.by_component("loss")["logits and loss"] > 2 * 1024 * FOUR.vocab_size * (2 + 4)


def test_less_work_and_more_sharing_need_less() -> None:
    TWO = replace(FOUR, layers=2)
    lengths = [ledger(length=length, spec=TWO).peak_allocated_bytes() for length in (512, 2048)]
    assert all(less < more for less, more in pairwise(lengths))
    rows = [ledger({"micro_batch": rows}, spec=TWO).peak_allocated_bytes() for rows in (1, 4)]
    assert all(less < more for less, more in pairwise(rows))
    stages = [ledger({"data": 8, "zero": zero}, spec=TWO).peak_allocated_bytes() for zero in (3, 2, 1, 0)]
    assert all(less <= more for less, more in pairwise(stages))
    assert stages[0] < stages[-1] / 2
    ranks = [ledger({"data": ranks, "zero": 3}, spec=TWO).peak_allocated_bytes() for ranks in (512, 8, 2)]
    assert all(less < more for less, more in pairwise(ranks))


def test_more_is_reserved_than_allocated_and_the_same_every_time() -> None:
    first, second = ledger(), ledger()
    assert first == second
    assert first.peak_reserved_bytes() >= first.peak_allocated_bytes()
    assert first.by_component("backward")["cuda context"] > 0


def test_a_simulation_leaves_nothing_behind() -> None:
    before = (torch.nn.functional.scaled_dot_product_attention, torch.UntypedStorage.resize_, torch.get_default_dtype())
    ledger({"data": 8, "zero": 3})
    after = (torch.nn.functional.scaled_dot_product_attention, torch.UntypedStorage.resize_, torch.get_default_dtype())
    assert before == after
    assert not torch.distributed.is_initialized()
    assert type(torch.empty(1)) is torch.Tensor


def test_a_world_inside_a_world_is_refused() -> None:
    with fake_world(2), pytest.raises(UserError, match="simulate in another process"), fake_world(4):
        pass
    assert not torch.distributed.is_initialized()


def test_peaks_at_different_moments_of_two_depths_grow_by_their_sum() -> None:
    """Kinds that shrink from one depth to the next cannot go below nothing, and must not make the others grow more."""
    few = PhasePeak("init", 100, 100, alive=[Allocation(60, "weights"), Allocation(40, "gradients")])
    more = PhasePeak("init", 110, 110, alive=[Allocation(100, "weights"), Allocation(10, "gradients")])
    (found,) = extrapolated([few], [more], periods=10)
    assert found.allocated_bytes == 210
    assert [(each.component, each.bytes) for each in found.alive] == [("weights", 210)]
